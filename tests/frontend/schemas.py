"""JSON schemas over all keywords, written by rule: what is followed, and what is refused for which keyword.

`all_schemas()` is for whoever has a model or a sampler: what follows a schema must satisfy jsonschema. The
small ones, whose output is short, are in tests/golden/schemas.json.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

Schema = dict[str, Any]
KNOWN: dict[str, Schema] = json.loads((Path(__file__).parents[1] / "golden" / "schemas.json").read_bytes())


class SchemaCase(NamedTuple):
    """`refused`: the end of the place that the refusal names; None for a schema that is followed."""

    name: str
    schema: Schema
    refused: str | None


def all_schemas() -> list[SchemaCase]:
    """Every case; at least 300, of which most are followed. Names are unique."""
    return [*_followed(), *_refused()]


def _wrap(schema: Schema) -> Schema:
    """An object that holds a value."""
    object_: Schema = {"type": "object", "properties": {"v": schema}, "required": ["v"]}
    return object_ | {"additionalProperties": False}


def _followed() -> Iterator[SchemaCase]:
    for name, schema in KNOWN["leaves"].items():
        yield SchemaCase(name, schema, None)
        if "$ref" in str(schema):  # references are to places in the whole
            continue
        yield SchemaCase(f"{name}/in-array", {"type": "array", "items": schema, "maxItems": 2}, None)
        yield SchemaCase(f"{name}/in-object", _wrap(schema), None)
        yield SchemaCase(f"{name}/in-defs", {"$ref": "#/$defs/v", "$defs": {"v": schema}}, None)
    for name, schema in KNOWN["open"].items():  # they say something of one type and leave the others free
        yield SchemaCase(f"open-{name}", schema, None)
        yield SchemaCase(f"open-{name}/in-object", _wrap(schema), None)
    for name, value in KNOWN["annotations"].items():
        schema = {"type": "integer", "maximum": 9, "minimum": 0, name: value}
        yield SchemaCase(f"annotation-{name}", schema, None)
    objects = [(name, one) for name, one in KNOWN["leaves"].items() if name.startswith("object-")]
    for (first, one), (second, two) in itertools.islice(itertools.combinations(objects, 2), 20):
        yield SchemaCase(f"anyOf-{first}-{second}", {"anyOf": [one, two]}, None)


def _refused() -> Iterator[SchemaCase]:
    for keyword, value in KNOWN["refused"].items():
        yield SchemaCase(f"refused-{keyword}", {keyword: value}, f".{keyword}")
        inner = {"type": "object", "properties": {"a": {keyword: value}}}
        yield SchemaCase(f"refused-{keyword}/in-object", inner, f".properties.a.{keyword}")
    for name, schema in KNOWN["uncompiled"].items():  # the compiler alone can tell: the place is the schema's
        yield SchemaCase(f"refused-{name}", schema, "json")
        if "$ref" in str(schema):
            continue
        inner = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
        yield SchemaCase(f"refused-{name}/in-object", inner, ".properties.a")
