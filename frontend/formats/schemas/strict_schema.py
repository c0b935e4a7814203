"""OpenAI's rules for the schema of a format with strict: true."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from ....ipc.errors import SamplingParamsError
from . import keywords


def check_strict(place: str, schema: dict[str, Any]) -> None:
    """The root is an object; every object has all of its properties required, and says which others it has.

    Which others, OpenAI's own server wants to be none; here dict[str, int] in a model is followed too.

    `schema`: as `read_json` gives it. Raises SamplingParamsError with the place within the schema.
    """
    if schema.get("type") != "object" or "anyOf" in schema:
        allowed = "'object', and no anyOf beside it, with strict=true"
        raise SamplingParamsError(f"{place}.type", schema.get("type"), allowed)
    for where, part in list_schemas(place, schema):
        if part.get("type") == "object" or "properties" in part:
            _check_object(where, part)


def _check_object(place: str, schema: dict[str, Any]) -> None:
    if "additionalProperties" not in schema:
        allowed = "false with strict=true, or a schema of other properties"
        raise SamplingParamsError(f"{place}.additionalProperties", None, allowed)
    names = schema.get("properties") or {}
    required = schema.get("required") or []
    if isinstance(names, dict) and isinstance(required, list):
        missing = [name for name in cast(dict[str, Any], names) if name not in required]
        if missing:
            optional = "one that may be missing has type [..., 'null']"
            allowed = f"all properties with strict=true, also {missing[0]!r} ({optional})"
            raise SamplingParamsError(f"{place}.required", required, allowed)


def list_schemas(place: str, schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schema and all within it, with their places."""
    if not isinstance(schema, dict):
        return
    yield place, cast(dict[str, Any], schema)
    for where, part in list_parts(cast(dict[str, Any], schema)):
        yield from list_schemas(f"{place}.{where}", part)


def list_parts(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """What stands directly within a schema where schemas do, with its place."""
    for name, value in schema.items():
        if name in keywords.SCHEMA:
            yield name, value
        elif name in keywords.SCHEMA_LISTS and isinstance(value, list):
            yield from ((f"{name}[{number}]", part) for number, part in enumerate(cast(list[Any], value)))
        elif name in keywords.SCHEMA_MAPS and isinstance(value, dict):
            yield from ((f"{name}.{key}", part) for key, part in cast(dict[str, Any], value).items())
