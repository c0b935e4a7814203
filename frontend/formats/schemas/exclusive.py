"""oneOf of references, as discriminated unions are written -> anyOf, where no value can be of two branches.

llguidance takes a oneOf whose branches say in place that they exclude each other, and follows no reference
to find out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, cast

from . import keywords
from .strict_schema import list_schemas

_MAX_HOPS = 8  # from reference to reference; they may form a circle


class _Facts(NamedTuple):
    """What a schema says in so many words. values: by required property, all texts and integers it can be."""

    types: tuple[str, ...]
    values: dict[str, frozenset[Any]]


def replace_exclusive_one_of(root: dict[str, Any]) -> None:
    """Rename, in place, each oneOf with references in which two can be seen not to hold at once.

    `root`: a schema that was checked, with all its references.
    """
    schemas = [schema for _, schema in list_schemas("", root)]
    if any("/oneOf/" in schema.get("$ref", "") for schema in schemas):
        return  # what refers to a branch would refer to nothing
    reader = _Reader(root)
    for schema in schemas:
        branches = schema.get("oneOf", [])
        has_references = any(isinstance(one, dict) and "$ref" in one for one in branches)
        if has_references and "anyOf" not in schema and _are_exclusive(map(reader.read, branches)):
            schema["anyOf"] = schema.pop("oneOf")


class _Reader:
    """Reads schemas of one root, each that is referred to once."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._known: dict[str, _Facts] = {}

    def read(self, schema: Any) -> _Facts:
        """What is said where a chain of mere references leads."""
        if not isinstance(schema, dict) or list(cast(dict[str, Any], schema)) != ["$ref"]:
            return self._read_here(schema)
        pointer = cast(str, schema["$ref"])
        if pointer not in self._known:
            self._known[pointer] = self._read_here(self._resolve(schema))
        return self._known[pointer]

    def _read_here(self, schema: Any) -> _Facts:
        if not isinstance(schema, dict):
            return _Facts(keywords.TYPES, {})
        schema = cast(dict[str, Any], schema)
        types = schema.get("type", keywords.TYPES)
        properties = schema.get("properties", {})
        found = {name: self._list_values(properties.get(name)) for name in schema.get("required", [])}
        values = {name: values for name, values in found.items() if values}
        # An integer is a number.
        named = {
            "number" if one == "integer" else one for one in ([types] if isinstance(types, str) else types)
        }
        return _Facts(tuple(named), values)

    def _list_values(self, schema: Any) -> frozenset[Any]:
        """None at all if a property can have others than texts and integers."""
        schema = self._resolve(schema)
        if not isinstance(schema, dict):
            return frozenset()
        schema = cast(dict[str, Any], schema)
        values = [schema["const"]] if "const" in schema else schema.get("enum", [])
        return frozenset(values) if all(type(one) in (str, int) for one in values) else frozenset()

    def _resolve(self, schema: Any) -> Any:
        for _ in range(_MAX_HOPS):
            if not isinstance(schema, dict) or list(cast(dict[str, Any], schema)) != ["$ref"]:
                break
            schema = self._find(cast(str, schema["$ref"]))
        return schema

    def _find(self, pointer: str) -> Any:
        """The schema of a pointer, which there is; nothing is said of one with percent signs."""
        if "%" in pointer:
            return {}
        found: Any = self._root
        for part in pointer.split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list):
                found = cast(list[Any], found)[int(name)]
            else:
                found = found[name]
        return found


def _are_exclusive(branches: Iterable[_Facts]) -> bool:
    by_type: dict[str, list[_Facts]] = {}
    for facts in branches:
        for one in facts.types:
            by_type.setdefault(one, []).append(facts)
    return all(
        len(group) == 1 or (kind == "object" and _has_discriminator(group)) for kind, group in by_type.items()
    )


def _has_discriminator(group: list[_Facts]) -> bool:
    """Whether there is a required property with a value of its own in each."""
    names = set[str].intersection(*(set(facts.values) for facts in group))
    return any(
        sum(len(facts.values[name]) for facts in group)
        == len(frozenset[Any]().union(*(facts.values[name] for facts in group)))
        for name in names
    )
