"""JSON schemas over all keywords, written by rule: what is followed, and what is refused for which keyword.

`all_schemas()` is for whoever has a model or a sampler: what follows a schema must satisfy jsonschema.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

Schema = dict[str, Any]


class SchemaCase(NamedTuple):
    """`refused`: the end of the place that the refusal names; None for a schema that is followed."""

    name: str
    schema: Schema
    refused: str | None


# Small schemas whose output is short, by the keyword that they are about.
_TEXTS: dict[str, Schema] = {
    "string": {"maxLength": 8},
    "minLength": {"minLength": 2, "maxLength": 5},
    "exact": {"minLength": 3, "maxLength": 3},
    "pattern": {"pattern": "^[a-c]{1,4}$"},
    "anywhere": {"pattern": "x", "maxLength": 6},
    "digits": {"pattern": r"^\d{2}-\d{2}$"},
    "alternatives": {"pattern": "^(ab|cd|e?f)$"},
    "pattern-length": {"pattern": "^a*b*$", "minLength": 2, "maxLength": 4},
    "unicode": {"pattern": "^[é-ü]{1,3}$"},
    "escapes": {"pattern": '^["\\\\/]{1,2}$'},
    "const": {"const": 'a "quoted" \\ text'},
    "enum": {"enum": ["red", "green", "", "blue\n"]},
}
_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
_INTEGERS: dict[str, Schema] = {
    "range": {"minimum": -3, "maximum": 12},
    "exclusive": {"exclusiveMinimum": 0, "exclusiveMaximum": 5},
    "minimum": {"minimum": 1000, "maximum": 10**6},
    "negative": {"maximum": -1, "minimum": -99},
    "one": {"minimum": 7, "maximum": 7},
    "multipleOf": {"multipleOf": 7, "minimum": 0, "maximum": 100},
    "even": {"multipleOf": 2, "minimum": -20, "maximum": 20},
    "const": {"const": 42},
    "enum": {"enum": [1, 2, 3]},
    "both-bounds": {"minimum": 0, "exclusiveMinimum": 2, "maximum": 9, "exclusiveMaximum": 9},
}
_NUMBERS: dict[str, Schema] = {
    "range": {"minimum": 0, "maximum": 1},
    "exclusive": {"exclusiveMinimum": -1.5, "exclusiveMaximum": 2.5},
    "multipleOf": {"multipleOf": 0.25, "minimum": 0, "maximum": 8},
    "const": {"const": 1.5},
    "enum": {"enum": [0.5, 1, 2.25]},
}
_SHORT = {"type": "integer", "minimum": 0, "maximum": 99}
_WORD = {"type": "string", "pattern": "^[a-z]{1,5}$"}
_FLAG = {"type": "boolean"}
_ARRAYS: dict[str, Schema] = {
    "items": {"items": _SHORT, "maxItems": 4},
    "minItems": {"items": _FLAG, "minItems": 2, "maxItems": 3},
    "exact": {"items": _WORD, "minItems": 1, "maxItems": 1},
    "none": {"maxItems": 0},
    "tuple": {"prefixItems": [_SHORT, _WORD], "items": False, "minItems": 2},
    "tuple-rest": {"prefixItems": [_FLAG], "items": _SHORT, "maxItems": 3},
    "old-tuple": {"items": [_SHORT, _WORD], "additionalItems": False, "minItems": 2},
    "nested": {"items": {"type": "array", "items": _FLAG, "maxItems": 2}, "maxItems": 2},
    "closed": {"items": False},
    "const": {"const": [1, "a", None]},
    "enum": {"enum": [[], [1], [[2]]]},
}
_CLOSED: Schema = {"additionalProperties": False}


def _tagged(tag: Schema) -> Schema:
    """A branch of a union whose property k says which it is."""
    return {"type": "object", "properties": {"k": tag}, "required": ["k"], **_CLOSED}


_OBJECTS: dict[str, Schema] = {
    "required": {"properties": {"a": _SHORT, "b": _WORD}, "required": ["a", "b"], **_CLOSED},
    "optional": {"properties": {"a": _SHORT, "b": _WORD, "c": _FLAG}, **_CLOSED},
    "some-required": {"properties": {"a": _SHORT, "b": _WORD, "c": _FLAG}, "required": ["b"], **_CLOSED},
    "none": {"properties": {}, **_CLOSED},
    "nested": {
        "properties": {"a": {"type": "object", "properties": {"b": _FLAG}, "required": ["b"], **_CLOSED}},
        "required": ["a"],
        **_CLOSED,
    },
    "patternProperties": {"patternProperties": {"^[a-c]$": _SHORT}, **_CLOSED},
    "properties-and-patterns": {
        "properties": {"name": _WORD},
        "patternProperties": {"^x[0-9]$": _FLAG},
        "required": ["name"],
        **_CLOSED,
    },
    "odd-names": {"properties": {'a "b"': _FLAG, "é/~\\": _FLAG}, "required": ['a "b"', "é/~\\"], **_CLOSED},
    "const": {"const": {"a": [1, {"b": None}]}},
    "enum": {"enum": [{}, {"a": 1}]},
    "never": {"properties": {"a": _SHORT, "b": False}, "required": ["a"], **_CLOSED},
}
_OTHERS: dict[str, Schema] = {
    "null": {"type": "null"},
    "boolean": {"type": "boolean"},
    "types": {"type": ["null", "boolean"]},
    "optional-text": {"type": ["string", "null"], "maxLength": 4},
    "const-null": {"const": None},
    "const-bool": {"const": False},
    "enum-mixed": {"enum": [1, "1", None, True, 2.5, [], {}]},
    "anyOf": {"anyOf": [_SHORT, _WORD, {"type": "null"}]},
    "oneOf-types": {"oneOf": [_SHORT, _WORD]},
    "oneOf-const": {
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": k}, "v": v}, "required": ["k", "v"], **_CLOSED}
            for k, v in (("a", _SHORT), ("b", _WORD))
        ],
        "discriminator": {"propertyName": "k"},
    },
    "oneOf-refs": {
        "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}, {"type": "null"}, {"$ref": "#/$defs/n"}],
        "$defs": {
            "n": {"$ref": "#/$defs/word"},
            "word": _SHORT,
            "kind": {"enum": ["b", "c", 1]},
            "a": _tagged({"const": "a"}),
            "b": _tagged({"$ref": "#/$defs/kind"}),
        },
    },
    "format-hint": {"type": "string", "format": "password", "maxLength": 4},
    "allOf-numbers": {"allOf": [{"type": "integer"}, {"minimum": 3}, {"maximum": 30}]},
    "allOf-texts": {"allOf": [{"type": "string", "maxLength": 5}, {"pattern": "^a"}]},
    "allOf-objects": {
        "type": "object",
        "allOf": [
            {"properties": {"a": _SHORT}, "required": ["a"]},
            {"properties": {"b": _WORD}, "required": ["b"]},
        ],
        "properties": {"a": {}, "b": {}},
        **_CLOSED,
    },
    "ref": {"$ref": "#/$defs/x", "$defs": {"x": _SHORT}},
    "ref-sibling": {"$ref": "#/$defs/x", "minimum": 50, "$defs": {"x": _SHORT}},
    "ref-definitions": {"$ref": "#/definitions/a~1b", "definitions": {"a/b": _WORD}},
    "ref-property": {
        "type": "object",
        "properties": {"a": _SHORT, "b": {"$ref": "#/properties/a"}},
        "required": ["a", "b"],
        **_CLOSED,
    },
    "ref-recursive": {
        "type": "object",
        "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}},
        "required": ["next"],
        **_CLOSED,
    },
    "ref-twice": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": _WORD}},
}
# These say something of one type and leave the others free, or leave properties free.
_OPEN: dict[str, Schema] = {
    "untyped-minLength": {"minLength": 2},
    "untyped-maxLength": {"maxLength": 2},
    "untyped-pattern": {"pattern": "^a"},
    "untyped-format": {"format": "date"},
    "untyped-minimum": {"minimum": 3},
    "untyped-multipleOf": {"multipleOf": 3},
    "untyped-items": {"items": _SHORT},
    "untyped-maxItems": {"maxItems": 1},
    "untyped-properties": {"properties": {"a": _SHORT}},
    "untyped-required": {"required": ["a"]},
    "untyped-closed": {"additionalProperties": False},
    "untyped-patterns": {"patternProperties": {"^a": _SHORT}},
    "two-types": {"type": ["string", "integer"], "maxLength": 2, "minimum": 3, "maximum": 50},
    "anything": {"description": "nothing is said"},
    "object": {"type": "object"},
    "open": {"type": "object", "properties": {"a": _SHORT}},
    "open-required": {"type": "object", "properties": {"a": _SHORT}, "required": ["a", "z"]},
    "map": {"type": "object", "additionalProperties": _SHORT},
    "map-and-properties": {"type": "object", "properties": {"a": _FLAG}, "additionalProperties": _SHORT},
    "patterns-and-map": {
        "type": "object",
        "patternProperties": {"^[a-m]+$": _SHORT},
        "additionalProperties": _FLAG,
    },
    "maxProperties": {"type": "object", "additionalProperties": _SHORT, "maxProperties": 1},
    "minProperties": {"type": "object", "additionalProperties": _SHORT, "minProperties": 1},
    "no-properties": {"type": "object", "maxProperties": 0},
    "array": {"type": "array"},
    "number": {"type": "number"},
    "integer": {"type": "integer"},
    "integer-minimum": {"type": "integer", "minimum": 5},
    "number-maximum": {"type": "number", "maximum": -0.5},
    "text": {"type": "string"},
    "enum-typed": {"type": "string", "enum": ["a", 1, "b"]},
    "const-and-enum": {"const": 1, "enum": [1, 2]},
    "enum-bounded": {"enum": [1, 5, 9], "minimum": 2},
    "anyOf-beside": {
        "type": "integer",
        "anyOf": [{"minimum": 90}, {"maximum": 10}],
        "maximum": 99,
        "minimum": 0,
    },
    "anyOf-overlap": {"anyOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]},
    "items-any": {"type": "array", "minItems": 1, "maxItems": 2},
    "tuple-open": {"type": "array", "prefixItems": [_SHORT, _WORD]},
}
_ANNOTATIONS: Schema = {
    "title": "A title",
    "description": "What it is",
    "default": 1,
    "examples": [1, 2],
    "example": 1,
    "deprecated": True,
    "readOnly": True,
    "writeOnly": False,
    "$comment": "for people",
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "$id": "https://example.com/schema",
    "$anchor": "here",
    "contentMediaType": "text/plain",
    "contentEncoding": "base64",
    "xml": {"name": "x"},
    "externalDocs": {"url": "https://example.com"},
    "x-order": 3,
    "nullable": False,
    "uniqueItems": False,
    "unevaluatedProperties": True,
}
_REFUSED: Schema = {
    "not": {"type": "null"},
    "if": {"type": "string"},
    "then": {"maxLength": 3},
    "else": False,
    "contains": {"type": "integer"},
    "minContains": 1,
    "maxContains": 2,
    "uniqueItems": True,
    "dependencies": {"a": ["b"]},
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {"required": ["b"]}},
    "propertyNames": {"pattern": "^a"},
    "unevaluatedProperties": False,
    "unevaluatedItems": False,
    "nullable": True,
    "$dynamicRef": "#x",
    "$dynamicAnchor": "x",
    "$recursiveRef": "#",
    "$vocabulary": {},
    "extends": {},
    "divisibleBy": 2,
    "x-guidance": {"lenient": True},
    "minimun": 3,
    "type": "text",
    "enum": [],
    "required": "a",
    "minLength": -1,
    "maxItems": 1.5,
    "minimum": "1",
    "exclusiveMinimum": True,
    "multipleOf": 0,
    "pattern": 3,
    "format": "postcode",
    "properties": [],
    "items": 3,
    "anyOf": [],
    "allOf": {},
    "$ref": "https://example.com/schema",
    "additionalProperties": "no",
}
# What the compiler alone can tell: the end of the place is that of the schema.
_UNCOMPILED: dict[str, Schema] = {
    "look-ahead": {"type": "string", "pattern": "(?=a)b"},
    "look-behind": {"type": "string", "pattern": "(?<!a)b"},
    "back-reference": {"type": "string", "pattern": r"(a)\1"},
    "no-pattern": {"type": "string", "pattern": "("},
    "oneOf-overlap": {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]},
    **{
        f"oneOf-refs-overlap-{name}": {
            "oneOf": [_tagged(one), {"$ref": "#/$defs/a"}],
            "$defs": {"a": _tagged(two)},
        }
        for name, (one, two) in {
            "same": ({"const": "a"}, {"const": "a"}),
            "within": ({"const": "a"}, {"enum": ["b", "a"]}),
            "number": ({"const": 1}, {"const": 1.0}),
            "open": ({"const": "a"}, {"type": "string"}),
        }.items()
    },
    "lengths": {"type": "string", "minLength": 5, "maxLength": 2},
    "bounds": {"type": "integer", "minimum": 5, "maximum": 2},
}


def all_schemas() -> list[SchemaCase]:
    """Every case; at least 300, of which most are followed. Names are unique."""
    return [*_followed(), *_refused()]


def _leaves() -> Iterator[tuple[str, Schema]]:
    """Schemas of one value."""
    for kind, schemas in (
        ("string", _TEXTS),
        ("integer", _INTEGERS),
        ("number", _NUMBERS),
        ("array", _ARRAYS),
        ("object", _OBJECTS),
    ):
        for name, schema in schemas.items():
            yield f"{kind}-{name}", {"type": kind, **schema}
    for name in _FORMATS:
        yield f"format-{name}", {"type": "string", "format": name}
    yield from _OTHERS.items()


def _followed() -> Iterator[SchemaCase]:
    leaves = list(_leaves())
    for name, schema in leaves:
        yield SchemaCase(name, schema, None)
        if "$ref" in str(schema):  # references are to places in the whole
            continue
        yield SchemaCase(f"{name}/in-array", {"type": "array", "items": schema, "maxItems": 2}, None)
        wrapped = {"type": "object", "properties": {"v": schema}, "required": ["v"], **_CLOSED}
        yield SchemaCase(f"{name}/in-object", wrapped, None)
        yield SchemaCase(f"{name}/in-defs", {"$ref": "#/$defs/v", "$defs": {"v": schema}}, None)
    for name, schema in _OPEN.items():
        yield SchemaCase(f"open-{name}", schema, None)
        inner = {"type": "object", "properties": {"v": schema}, "required": ["v"], **_CLOSED}
        yield SchemaCase(f"open-{name}/in-object", inner, None)
    for name, value in _ANNOTATIONS.items():
        yield SchemaCase(
            f"annotation-{name}", {"type": "integer", "maximum": 9, "minimum": 0, name: value}, None
        )
    for (first, one), (second, two) in itertools.islice(itertools.combinations(_OBJECTS.items(), 2), 20):
        choice = {"anyOf": [{"type": "object", **one}, {"type": "object", **two}]}
        yield SchemaCase(f"anyOf-{first}-{second}", choice, None)


def _refused() -> Iterator[SchemaCase]:
    for keyword, value in _REFUSED.items():
        yield SchemaCase(f"refused-{keyword}", {keyword: value}, f".{keyword}")
        inner = {"type": "object", "properties": {"a": {keyword: value}}}
        yield SchemaCase(f"refused-{keyword}/in-object", inner, f".properties.a.{keyword}")
    for name, schema in _UNCOMPILED.items():
        yield SchemaCase(f"refused-{name}", schema, "json")
        if "$ref" in str(schema):
            continue
        inner = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
        yield SchemaCase(f"refused-{name}/in-object", inner, ".properties.a")
