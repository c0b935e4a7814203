"""Whether a JSON schema that nobody follows is one: a tool's, where the model is free in its arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from ...ipc.errors import SamplingParamsError
from . import keywords
from .json_schema import PLAIN_CHECKS, check_nesting

_SCHEMAS = keywords.SCHEMA | {"not", "if", "then", "else", "contains", "propertyNames", "additionalItems"}


def check_valid(place: str, schema: dict[str, Any]) -> None:
    """Raise SamplingParamsError with the place of what no JSON schema may have.

    Keywords that cannot be honoured, or are not known, are none of it. Takes time as the schema is large.
    """
    check_nesting(place, schema)
    left: list[tuple[str, Any]] = [(place, schema)]
    while left:
        where, one = left.pop()
        if isinstance(one, bool):
            continue
        if not isinstance(one, dict):
            raise SamplingParamsError(where, one, "a schema: an object, true or false")
        for name, value in cast(dict[str, Any], one).items():
            if name in PLAIN_CHECKS:
                PLAIN_CHECKS[name](f"{where}.{name}", value)
            else:
                left += _list_schemas(f"{where}.{name}", name, value)


def _list_schemas(place: str, name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The schemas that a keyword's value holds."""
    if name in keywords.SCHEMA_MAPS:
        if not isinstance(value, dict):
            raise SamplingParamsError(place, value, "an object of schemas by name")
        for key, one in cast(dict[str, Any], value).items():
            yield f"{place}.{key}", one
    elif name in keywords.SCHEMA_LISTS or (name == "items" and isinstance(value, list)):
        if not isinstance(value, list):
            raise SamplingParamsError(place, value, "a list of schemas")
        for number, one in enumerate(cast(list[Any], value)):
            yield f"{place}[{number}]", one
    elif name in _SCHEMAS:
        yield place, value
