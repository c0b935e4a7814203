"""Which JSON types a schema allows. Understands what names types and refers to them, nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

_MAX_SCHEMAS = 1000  # within unions
_MAX_HOPS = 8  # from reference to reference; they may form a circle


def list_types(schema: object, root: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that a schema allows, as far as it names them; none if it does not.

    root: the schema that its references lead into.
    """
    types, waiting, seen = set[str](), [schema], set[int]()
    while waiting and len(seen) < _MAX_SCHEMAS:
        fields = resolve(waiting.pop(), root)
        if id(fields) in seen:
            continue
        seen.add(id(fields))
        declared = fields.get("type")
        types.update(name for name in [declared, *_list(declared)] if isinstance(name, str))
        types.update(map(type_of, _list(fields.get("enum"))))
        if "const" in fields:
            types.add(type_of(fields["const"]))
        for union in ("anyOf", "oneOf", "allOf"):
            waiting += _list(fields.get(union))
    return frozenset(types)


def resolve(schema: object, root: Mapping[str, Any]) -> dict[str, Any]:
    """A schema, or what it refers to within `root`; empty if there is no such schema."""
    for _ in range(_MAX_HOPS):
        if not isinstance(schema, dict):
            return {}
        pointer = cast(dict[str, Any], schema).get("$ref")
        if not isinstance(pointer, str):
            return cast(dict[str, Any], schema)
        schema = root
        for part in pointer.split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            schema = schema.get(name) if isinstance(schema, dict) else None
    return {}


def _list(value: object) -> list[Any]:
    return cast(list[Any], value) if isinstance(value, list) else []


def type_of(value: object) -> str:
    """The JSON type of a decoded value; 'integer' for a number without a point or an exponent."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case dict():
            return "object"
        case _:
            return "array"
