"""The keywords of JSON Schema (2020-12, and what older drafts and OpenAPI write) by what becomes of each.

llguidance ignores names that it does not know, so every name is looked up here, and one that would be ignored
and says something about the output is refused.
"""

from __future__ import annotations

from typing import Any

# Keywords whose value is a schema, a list of schemas, schemas by name.
SCHEMA = frozenset({"additionalProperties", "items"})
SCHEMA_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
SCHEMA_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})

# Keywords whose value is plain.
COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})
NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
VALUES = frozenset({"type", "enum", "const", "required", "pattern", "format", "$ref"})

# Of these nothing follows for the output, so they are left out.
_ANNOTATIONS = (
    "title description default example examples deprecated readOnly writeOnly contentEncoding "
    "contentMediaType contentSchema discriminator externalDocs xml $schema $id id $anchor $comment"
)
ANNOTATIONS = frozenset(_ANNOTATIONS.split())

# Keywords that cannot be honoured, but say nothing when they have one of these values.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "uniqueItems": (False,),
    "nullable": (False,),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "propertyNames": (True,),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "$recursiveAnchor": (False,),
}
# Those that another keyword says.
OTHER_FORMS = frozenset(
    {"additionalItems", "exclusiveMinimum", "exclusiveMaximum", "nullable", "propertyNames"}
)

# Keywords that are known and cannot be honoured, with what does instead, if something does.
_REFUSED_FOR_NOTHING = (
    "not if then else contains minContains maxContains uniqueItems dependencies dependentRequired "
    "dependentSchemas $dynamicAnchor $recursiveAnchor $vocabulary disallow"
)
REFUSED = dict.fromkeys(_REFUSED_FOR_NOTHING.split(), "") | {
    "propertyNames": "; patternProperties with additionalProperties: false says it of properties",
    "unevaluatedProperties": "; additionalProperties: false is",
    "unevaluatedItems": "; items: false is",
    "nullable": "; type: [..., 'null'] is",
    "$dynamicRef": "; $ref is",
    "$recursiveRef": "; $ref is",
    "extends": "; allOf is",
    "divisibleBy": "; multipleOf is",
    "x-guidance": "; structured_outputs.whitespace_pattern is",
}

KNOWN = SCHEMA | SCHEMA_LISTS | SCHEMA_MAPS | COUNTS | NUMBERS | VALUES | ANNOTATIONS | REFUSED.keys()

TYPES = ("null", "boolean", "object", "array", "number", "integer", "string")

# Formats of texts that llguidance follows.
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
# What a format means besides llguidance's rule for it, by which every year has a 29 February, every minute a
# second 60, and a name any length (RFC 3339, RFC 1123). Python and jsonschema read no year 0000.
_PAIR = "(?:0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = f"(?:[0-9]{{2}}{_PAIR}|{_PAIR}00)"
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_DAY = {"pattern": f"^(?:{_LEAP_YEAR}-|{_YEAR}-(?:0[13-9]|1|02-(?:[01]|2[0-8])))"}
_SECOND = {"pattern": "^[^:]*:[^:]*:[0-5]"}
FORMAT_BOUNDS: dict[str, list[dict[str, Any]]] = {
    "date": [_DAY],
    "date-time": [_DAY, _SECOND],
    "time": [_SECOND],
    "hostname": [{"maxLength": 253}],
}
# Formats that llguidance does not know.
_BASE64 = "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
_UUID = "^[0-9a-f]{{8}}-[0-9a-f]{{4}}-{}[0-9a-f]{{3}}-[89ab][0-9a-f]{{3}}-[0-9a-f]{{12}}$"
FORMAT_PATTERNS = {
    "base64": _BASE64,
    "byte": _BASE64,
    "base64url": "^(?:[A-Za-z0-9_-]{4})*(?:[A-Za-z0-9_-]{2}==|[A-Za-z0-9_-]{3}=)?$",
    **{f"uuid{version}": _UUID.format(version) for version in range(1, 9)},
}
# Formats that say what a text is for, not which there are: OpenAPI's, and pydantic's of secrets and paths.
TEXT_HINTS = frozenset({"password", "binary", "path", "file-path", "directory-path"})
# OpenAPI's formats of numbers say how they are stored, not which there are.
NUMBER_FORMATS = frozenset({"int32", "int64", "float", "double"})
