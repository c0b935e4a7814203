"""A JSON schema as users write it -> the schema that llguidance follows, with nothing left that it would
ignore.

Every keyword is either honoured, or says nothing about the output and is dropped, or is refused by name
with its place. Older drafts' lists of `items` become prefixItems. What only a compiler can tell (oneOf that
may overlap, patterns, what nothing can satisfy) is left to it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, cast
from urllib.parse import unquote

import msgspec

from ....ipc.errors import SamplingParamsError, did_you_mean
from ....ipc.params.param_fields import make_plain
from ..offered_tools import resolve
from . import keywords
from .strict_schema import check_strict, list_schemas

# oneOf of references, as discriminated unions are written -> anyOf, where no value can be of two
# branches. llguidance takes a oneOf whose branches say in place that they exclude each other, and follows
# no reference to find out.


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
    known: dict[str, _Facts] = {}  # what is referred to is read once

    def read(branch: Any) -> _Facts:
        if not _is_reference(branch):
            return _read_facts(branch, root)
        if branch["$ref"] not in known:
            known[branch["$ref"]] = _read_facts(resolve(branch, root), root)
        return known[branch["$ref"]]

    for schema in schemas:
        branches = schema.get("oneOf", [])
        has_references = any(isinstance(branch, dict) and "$ref" in branch for branch in branches)
        if has_references and "anyOf" not in schema and _are_exclusive(map(read, branches)):
            schema["anyOf"] = schema.pop("oneOf")


def _read_facts(schema: Any, root: dict[str, Any]) -> _Facts:
    if not isinstance(schema, dict):
        return _Facts(keywords.TYPES, {})
    schema = cast(dict[str, Any], schema)
    types = schema.get("type", keywords.TYPES)
    properties = schema.get("properties", {})
    listed = {name: _list_values(properties.get(name), root) for name in schema.get("required", [])}
    values = {name: values for name, values in listed.items() if values}
    # An integer is a number.
    listed_types = [types] if isinstance(types, str) else types
    return _Facts(tuple({"number" if name == "integer" else name for name in listed_types}), values)


def _list_values(schema: Any, root: dict[str, Any]) -> frozenset[Any]:
    """The values that a property can have; empty if it can have others than texts and integers."""
    schema = resolve(schema, root) if _is_reference(schema) else schema
    if not isinstance(schema, dict):
        return frozenset()
    schema = cast(dict[str, Any], schema)
    values = [schema["const"]] if "const" in schema else schema.get("enum", [])
    return frozenset(values) if all(type(value) in (str, int) for value in values) else frozenset()


def _is_reference(schema: Any) -> bool:
    """Whether it says nothing but where another is."""
    return isinstance(schema, dict) and list(cast(dict[str, Any], schema)) == ["$ref"]


def _are_exclusive(branches: Iterable[_Facts]) -> bool:
    by_type: dict[str, list[_Facts]] = {}
    for facts in branches:
        for type_ in facts.types:
            by_type.setdefault(type_, []).append(facts)
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


MAX_NESTING = 64  # of objects and lists, as vLLM has it
# Of the root and all schemas that are referred to, summed: llguidance follows references recursively, and
# took twice as much before an 8 MB stack was full.
_MAX_REFERRED_NESTING = 1000
# Properties between two that are required: each may come next, and is 4 items of a parser's row (of 1,000,
# ipc/params/structured_outputs.py). A row is parsed first where an output comes to it.
_MAX_OPTIONAL = 240
_MAX_SCHEMAS = 25_000  # more than a text that may be sent holds, unless they are written out by name
_MAX_COUNT = 2**31 - 1
_MAX_INTEGER = 2**63 - 1024  # the largest that is a double
_MAX_NUMBER = 10**18
_MAX_MULTIPLE = 10_000  # of 1 or of a power of ten below: a state of the lexer each

Schema = dict[str, Any] | bool


def read_json(place: str, value: str | dict[str, Any]) -> Any:
    """A JSON text, or what Python has of one, as plain dicts and lists of bounded depth, which are new.

    Raises SamplingParamsError.
    """
    try:
        text = value if isinstance(value, str) else msgspec.json.encode(value)
        decoded = msgspec.json.decode(make_plain(text))
    except (msgspec.DecodeError, UnicodeError, TypeError, ValueError, OverflowError) as error:
        raise SamplingParamsError(place, value, f"JSON ({error})") from None
    except RecursionError:
        raise SamplingParamsError(place, "JSON", f"at most {MAX_NESTING} levels of nesting") from None
    check_nesting(place, decoded)
    return decoded


def check_nesting(place: str, value: Any) -> None:
    """Raise SamplingParamsError for more than MAX_NESTING levels."""
    level = [value]
    for _ in range(MAX_NESTING):
        level = [item for container in level for item in _list_containers(container)]
        if not level:
            return
    raise SamplingParamsError(place, "JSON", f"at most {MAX_NESTING} levels of nesting")


def _list_containers(value: Any) -> list[Any]:
    """The objects and lists directly within a value."""
    items: Iterable[Any] = ()
    if isinstance(value, dict):
        items = cast(dict[str, Any], value).values()
    elif isinstance(value, list):
        items = cast(list[Any], value)
    return [item for item in items if isinstance(item, (dict, list))]


def make_schema(
    place: str, value: str | dict[str, Any], closes_objects: bool = False, is_strict: bool = False
) -> dict[str, Any]:
    """The schema to be followed. `place`: what it is called in errors.

    closes_objects: objects whose properties are named have no others unless the schema says so.
    is_strict: it has to keep OpenAI's rules. Raises SamplingParamsError.
    """
    decoded = read_json(place, value)
    if not isinstance(decoded, dict):
        raise SamplingParamsError(place, decoded, "a JSON schema, which is an object")
    walk = _Walk(place, closes_objects, cast(dict[str, Any], decoded))
    made = walk.visit(decoded, place, "#")
    if is_strict:
        check_strict(place, cast(dict[str, Any], decoded))
    walk.check_references()
    if walk.references:
        replace_exclusive_one_of(cast(dict[str, Any], made))
    return cast(dict[str, Any], made)


class _Walk:
    """One pass over a schema, which notes which schemas there are and which are referred to."""

    def __init__(self, place: str, closes_objects: bool, root: dict[str, Any]) -> None:
        self._place = place
        self._root = root
        self._num_visited = 0
        self._closes_objects = closes_objects
        self._depths: dict[str, int] = {}  # by pointer, of each schema: levels below it
        self.references: dict[str, str] = {}  # pointer -> the place of the first $ref to it

    def visit(self, schema: Any, place: str, pointer: str) -> Schema:
        """The schema of `pointer` (RFC 6901) as it is followed."""
        self._num_visited += 1
        if self._num_visited > _MAX_SCHEMAS:
            allowed = f"at most {_MAX_SCHEMAS} schemas, one for each name that propertyNames requires"
            raise SamplingParamsError(self._place, "more schemas", allowed)
        if isinstance(schema, bool):
            self._depths[pointer] = 0
            return schema
        if not isinstance(schema, dict):
            raise SamplingParamsError(place, schema, "a schema: an object, true or false")
        if _is_never(cast(dict[str, Any], schema)) and pointer != "#":
            self._depths[pointer] = 0
            return False
        schema = _replace_other_forms(cast(dict[str, Any], schema), place, self._root)
        made: dict[str, Any] = {}
        depth = 0
        for name, value in schema.items():
            where = f"{place}.{name}"
            below = f"{pointer}/{_escape(name)}"
            if name in keywords.SCHEMA:
                made[name] = self.visit(value, where, below)
                depth = max(depth, self._depths[below])
            elif name in keywords.SCHEMA_LISTS or name in keywords.SCHEMA_MAPS:
                made[name], levels = self._visit_many(name, value, where, below)
                depth = max(depth, levels)
            elif name == "$ref":
                made[name] = self._note_reference(value, where)
            elif name in _CHECKS:
                made[name] = _CHECKS[name](where, value)
            else:
                _check_dropped(name, value, where, pointer)
        _check_format(made, schema, place)
        _settle_bounds(made, place)
        _check_optional(made, place)
        if self._closes_objects and ("properties" in made or "patternProperties" in made):
            made.setdefault("additionalProperties", False)
        self._depths[pointer] = depth + 1
        return made

    def check_references(self) -> None:
        """Every reference must lead to a schema, and all of them together to no more than is followed."""
        total = self._depths["#"]
        for target, place in self.references.items():
            depth = self._depths.get(target, self._depths.get(unquote(target)))
            if depth is None:
                allowed = "the place of a schema in this one, such as #/$defs/name"
                raise SamplingParamsError(place, target, allowed)
            total += depth
        if total > _MAX_REFERRED_NESTING:
            allowed = f"at most {_MAX_REFERRED_NESTING} levels of nesting in all schemas that are referred to"
            raise SamplingParamsError(self._place, f"{total} levels", allowed)

    def _visit_many(self, name: str, value: Any, place: str, pointer: str) -> tuple[Any, int]:
        """The schemas of a list or a dict, and the levels below them."""
        if name in keywords.SCHEMA_LISTS:
            if not isinstance(value, list) or not value:
                raise SamplingParamsError(place, value, "a list of schemas that is not empty")
            schemas = cast(list[Any], value)
            pointers = [f"{pointer}/{number}" for number in range(len(schemas))]
            made: Any = [self.visit(part, f"{place}[{i}]", pointers[i]) for i, part in enumerate(schemas)]
        else:
            if not isinstance(value, dict):
                raise SamplingParamsError(place, value, "an object of schemas by name")
            named = cast(dict[str, Any], value)
            pointers = [f"{pointer}/{_escape(key)}" for key in named]
            made = {
                key: self.visit(schema, f"{place}.{key}", below)
                for (key, schema), below in zip(named.items(), pointers, strict=True)
            }
        return made, max((self._depths[below] for below in pointers), default=0)

    def _note_reference(self, value: Any, place: str) -> str:
        if not isinstance(value, str) or not (value == "#" or value.startswith("#/")):
            allowed = "a reference into this schema, such as #/$defs/name; nothing is fetched"
            raise SamplingParamsError(place, value, allowed)
        self.references.setdefault(value, place)
        return value


def _escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _is_never(schema: dict[str, Any]) -> bool:
    """Whether it is zod's way to write false, {"not": {}}."""
    return (schema.get("not") is True or schema.get("not") == {}) and all(
        name == "not" or name in keywords.ANNOTATIONS for name in schema
    )


def _replace_other_forms(schema: dict[str, Any], place: str, root: dict[str, Any]) -> dict[str, Any]:
    """With this draft's keywords for those of older drafts, of OpenAPI, and for names of properties."""
    if not keywords.OTHER_FORMS.intersection(schema) and not isinstance(schema.get("items"), list):
        return schema
    schema = dict(schema)
    rest = schema.pop("additionalItems", True)
    if isinstance(schema.get("items"), list):
        schema["prefixItems"] = schema.pop("items")
        if rest is not True:
            schema["items"] = rest
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if schema.get(exclusive) is True and bound in schema:
            schema[exclusive] = schema.pop(bound)
        elif schema.get(exclusive) is False:
            del schema[exclusive]
    if schema.get("nullable") is True and isinstance(schema.get("type"), str):
        schema["type"] = [schema["type"], *({"null"} - {schema["type"]})]
        del schema["nullable"]
    if "propertyNames" in schema and (replaced := _replace_names(schema, place, root)):
        del schema["propertyNames"]
        schema |= replaced
    return schema


def _replace_names(schema: dict[str, Any], place: str, root: dict[str, Any]) -> dict[str, Any]:
    """What says of an object's properties what its propertyNames says; nothing where nothing else can."""
    names = schema["propertyNames"]
    names = resolve(names, root) if _is_reference(names) else names
    if not isinstance(names, dict) or "properties" in schema or "patternProperties" in schema:
        return {}
    says = {
        name: value for name, value in cast(dict[str, Any], names).items() if name not in keywords.ANNOTATIONS
    }
    place, rest = f"{place}.propertyNames", schema.get("additionalProperties", True)
    if says.pop("type", "string") != "string":
        return {}
    if "pattern" in says:
        says.pop("format", None)  # as zod writes it, which says with a pattern what it means by a format
    required: list[str] = []
    match list(says):
        case ["pattern"]:
            pattern = _check_pattern(f"{place}.pattern", says["pattern"])
        case ["minLength" | "maxLength", *others] if set(others) < {"minLength", "maxLength"}:
            least, most = (
                _check_count(f"{place}.{name}", says[name]) if name in says else "" for name in _LENGTHS
            )
            pattern = f"^(?s:.){{{least or 0},{most}}}$"
        case ["enum" | "const" as name]:
            values = [says[name]] if name == "const" else _check_enum(f"{place}.enum", says[name])
            texts = [value for value in values if isinstance(value, str)]
            # llguidance comes to no end where a pattern has no other names than those that are required.
            needed = set(_check_required(f"{place.rpartition('.')[0]}.required", schema.get("required", [])))
            required = [text for text in texts if text in needed]
            pattern = "|".join(re.escape(text) for text in texts if text not in needed)
            pattern = f"^(?:{pattern})$" if len(texts) > len(required) else ""
        case _:
            return {}
    made: dict[str, Any] = {"additionalProperties": False}
    made |= {"properties": dict.fromkeys(required, rest)} if required else {}
    return made | ({"patternProperties": {pattern: rest}} if pattern else {})


def _says_nothing(name: str, value: Any, place: str) -> bool:
    """Whether a keyword that cannot be honoured has a value with which it allows everything."""
    if name == "propertyNames" and isinstance(value, dict):
        # Names are texts.
        return all(
            key in keywords.ANNOTATIONS or (key == "type" and "string" in _check_type(f"{place}.type", part))
            for key, part in cast(dict[str, Any], value).items()
        )
    neutral = keywords.NEUTRAL.get(name, ())
    return any(type(value) is type(other) and value == other for other in neutral)


def _check_dropped(name: str, value: Any, place: str, pointer: str) -> None:
    """Nothing, if the keyword says nothing about the output."""
    if _says_nothing(name, value, place):
        return
    if name in keywords.REFUSED:
        allowed = f"no such keyword: it cannot be honoured{keywords.REFUSED[name]}"
        raise SamplingParamsError(place, value, allowed)
    if name in ("$id", "id") and pointer != "#" and isinstance(value, str) and not value.startswith("#"):
        raise SamplingParamsError(place, value, "an id at the schema's root only")
    if name not in keywords.ANNOTATIONS and not name.startswith("x-"):
        allowed = f"a keyword of JSON Schema{did_you_mean(name, keywords.KNOWN)}"
        raise SamplingParamsError(place, value, allowed)


def _check_type(place: str, value: Any) -> Any:
    types: list[Any] = cast(list[Any], value) if isinstance(value, list) else [value]
    if not types or not all(isinstance(name, str) and name in keywords.TYPES for name in types):
        raise SamplingParamsError(place, value, f"one of {', '.join(keywords.TYPES)}, or a list of them")
    return value


def _check_enum(place: str, value: Any) -> Any:
    if not isinstance(value, list) or not value:
        raise SamplingParamsError(place, value, "a list of values that is not empty")
    return cast(list[Any], value)


def _check_required(place: str, value: Any) -> Any:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in cast(list[Any], value)):
        raise SamplingParamsError(place, value, "a list of names of properties")
    return cast(list[Any], value)


def _check_pattern(place: str, value: Any) -> Any:
    if not isinstance(value, str) or "\0" in value:
        raise SamplingParamsError(place, value, "a regular expression")
    return value


def _check_count(place: str, value: Any) -> Any:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= _MAX_COUNT or value != int(value):
        raise SamplingParamsError(place, value, f"an integer from 0 to {_MAX_COUNT}")
    return int(value)


def _check_number(place: str, value: Any) -> Any:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not abs(value) < math.inf:
        raise SamplingParamsError(place, value, "a number")
    return value


def _check_multiple(place: str, value: Any) -> Any:
    number = _check_number(place, value)
    digits = 0
    while number > 0 and number != int(number) and digits < 9:
        digits += 1
        number = round(value * 10**digits, 9 - digits)
    if not 0 < number <= _MAX_MULTIPLE or number != int(number):
        allowed = f"a number above 0 of at most {_MAX_MULTIPLE}, without its decimal point"
        raise SamplingParamsError(place, value, allowed)
    return value


def _check_exclusive(place: str, value: Any) -> Any:
    """Older drafts say true or false, of the bound beside it."""
    return value if isinstance(value, bool) else _check_number(place, value)


def _check_format(made: dict[str, Any], schema: dict[str, Any], place: str) -> None:
    """A format is one of a text that is followed, or one that says nothing about the output."""
    if "format" not in schema:
        return
    value = schema["format"]
    types = schema.get("type")
    has_texts = types is None or "string" in types
    hints = keywords.TEXT_HINTS if has_texts else keywords.NUMBER_FORMATS
    # With a pattern beside it, as zod writes it, a format is the pattern's name.
    if isinstance(value, str) and (value in hints or ("pattern" in made and value not in keywords.FORMATS)):
        made.pop("format", None)
        return
    if isinstance(value, str) and value in keywords.FORMAT_PATTERNS:
        del made["format"]
        made["allOf"] = [*made.get("allOf", []), {"pattern": keywords.FORMAT_PATTERNS[value]}]
        return
    if not isinstance(value, str) or value not in keywords.FORMATS:
        raise SamplingParamsError(f"{place}.format", value, f"one of {', '.join(keywords.FORMATS)}")
    if value in keywords.FORMAT_BOUNDS:
        made["allOf"] = [*made.get("allOf", []), *keywords.FORMAT_BOUNDS[value]]


def _settle_bounds(made: dict[str, Any], place: str) -> None:
    """Let bounds be what llguidance follows: its integers have 64 bits, and its numbers no exponent."""
    if keywords.NUMBERS.isdisjoint(made):
        return
    types = made.get("type")
    is_integer = types == "integer" or (isinstance(types, list) and "number" not in types)
    most = _MAX_INTEGER if is_integer else _MAX_NUMBER
    for name, sign in (("minimum", -1), ("exclusiveMinimum", -1), ("maximum", 1), ("exclusiveMaximum", 1)):
        if name not in made:
            continue
        bound = made[name] * sign
        if bound > most:
            made[name] = most * sign  # no model writes a number beyond it
        elif bound <= -_MAX_NUMBER:
            raise SamplingParamsError(f"{place}.{name}", made[name], f"less than {_MAX_NUMBER} from 0")
    if not is_integer:
        _round_exclusive(made)


def _round_exclusive(made: dict[str, Any]) -> None:
    """Write an exclusive bound as one within it, where llguidance would let the bound itself through: at an
    integer that is less than 1 from the other bound, and nearer to 0.
    """
    for name, other, sign in (("Minimum", "Maximum", 1), ("Maximum", "Minimum", -1)):
        bound = made.get(f"exclusive{name}")
        ends = [made[key] for key in (f"exclusive{other}", other.lower()) if key in made]
        if bound is None or bound * sign < 0 or bound != int(bound):
            continue
        if any(0 < (end - bound) * sign < 1 for end in ends):
            digits = min(9, 15 - len(str(abs(int(bound)))))
            del made[f"exclusive{name}"]
            key = name.lower()
            within = round(bound + sign * 10**-digits, digits)
            made[key] = sign * max(sign * within, sign * made.get(key, within))


def _check_optional(made: dict[str, Any], place: str) -> None:
    """Bound how many properties may come next at any place of an object."""
    required = set(made.get("required", ()))
    num_next = longest = 0
    for name in made.get("properties", ()):
        num_next = 0 if name in required else num_next + 1
        longest = max(longest, num_next)
    if longest > _MAX_OPTIONAL:
        allowed = f"at most {_MAX_OPTIONAL} properties in a row that are not required"
        raise SamplingParamsError(f"{place}.properties", f"{longest} properties", allowed)


def _keep(_place: str, value: Any) -> Any:
    return value


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "type": _check_type,
    "enum": _check_enum,
    "const": _keep,
    "format": _keep,  # which depends on the type
    "required": _check_required,
    "pattern": _check_pattern,
    **dict.fromkeys(keywords.COUNTS, _check_count),
    **dict.fromkeys(keywords.NUMBERS - {"multipleOf"}, _check_number),
    "multipleOf": _check_multiple,
}
# Of any schema, whether it can be followed or not.
PLAIN_CHECKS = {name: check for name, check in _CHECKS.items() if check is not _keep} | {
    "multipleOf": _check_number,
    **dict.fromkeys(("exclusiveMaximum", "exclusiveMinimum"), _check_exclusive),
}


_LENGTHS = ("minLength", "maxLength")
_SCHEMAS = keywords.SCHEMA | {"not", "if", "then", "else", "contains", "propertyNames", "additionalItems"}


def check_valid(place: str, schema: dict[str, Any]) -> None:
    """Raise SamplingParamsError with the place of what no JSON schema may have.

    Keywords that cannot be honoured, or are not known, are none of it. Takes time as the schema is large.
    """
    check_nesting(place, schema)
    left: list[tuple[str, Any]] = [(place, schema)]
    while left:
        where, part = left.pop()
        if isinstance(part, bool):
            continue
        if not isinstance(part, dict):
            raise SamplingParamsError(where, part, "a schema: an object, true or false")
        for name, value in cast(dict[str, Any], part).items():
            if name in PLAIN_CHECKS:
                PLAIN_CHECKS[name](f"{where}.{name}", value)
            else:
                left += _list_schemas(f"{where}.{name}", name, value)


def _list_schemas(place: str, name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The schemas that a keyword's value holds."""
    if name in keywords.SCHEMA_MAPS:
        if not isinstance(value, dict):
            raise SamplingParamsError(place, value, "an object of schemas by name")
        for key, schema in cast(dict[str, Any], value).items():
            yield f"{place}.{key}", schema
    elif name in keywords.SCHEMA_LISTS or (name == "items" and isinstance(value, list)):
        if not isinstance(value, list):
            raise SamplingParamsError(place, value, "a list of schemas")
        for number, schema in enumerate(cast(list[Any], value)):
            yield f"{place}[{number}]", schema
    elif name in _SCHEMAS:
        yield place, value
