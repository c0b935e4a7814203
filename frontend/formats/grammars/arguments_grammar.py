"""ArgumentsGrammar: what stands for a call's arguments in each form, for any object and for a schema.

Only JSON is followed by llguidance as a whole. In other forms arguments are written one by one, each by the
schema of its property and in the schema's order; a schema that says more is refused with its place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from ....ipc.errors import SamplingParamsError
from ..offered_tools import list_types, resolve
from ..output_format import CallFormat
from ..schemas import keywords
from ..schemas.grammar_text import WHITESPACE_PATTERN, quote, to_json
from ..schemas.json_schema import make_schema
from ..schemas.strict_schema import list_schemas
from .lark import TEXT, LarkRules, escape_text
from .rules import ToolRule

_NEW_LINE = quote("\n")
_OPTIONS = {"x-guidance": {"whitespace_pattern": WHITESPACE_PATTERN}}
_WITHOUT_TAGS = "^(?:[^<]|<+[^</])*<*$"
# Said of arguments as a whole, which are written one by one.
_WHOLE = ("$ref", "allOf", "anyOf", "const", "enum", "minProperties", "oneOf")
_OF_TEXTS = ("format", "maxLength", "minLength", "pattern")


class ArgumentsGrammar:
    """Rules for the arguments of calls, in `lark`. schemas: what is followed, by place."""

    def __init__(self, calls: CallFormat, lark: LarkRules) -> None:
        self._calls = calls
        self._lark = lark
        self._names: dict[str, str] = {}  # of the rule of each place
        self._end = lark.write("}" if calls.name_key else "", calls.close)
        self.schemas: dict[str, dict[str, Any]] = {}

    def add(self, tool: ToolRule) -> str:
        """What a rule of a call has for the arguments of a tool and the call's end."""
        form = self._calls.form
        if not tool.takes_arguments:
            return self._end if form in ("xml", "python") else f'"{{}}" {self._end}'
        if tool.parameters is None:
            arguments = self._add_any()
        else:
            if tool.place not in self._names:
                self._names[tool.place] = self._add_schema(tool.place, tool.parameters)
            arguments = self._names[tool.place]
        return arguments if form == "xml" else f"{arguments} {self._end}"

    def _add_schema(self, place: str, parameters: dict[str, Any]) -> str:
        schema = _make_object_schema(place, parameters)
        name = f"args_{len(self._names)}"
        self.schemas[place] = schema
        if self._calls.form == "json":
            return self._lark.add(name, _write_json(schema))
        return self._add_members(name, place, schema)

    def _add_any(self) -> str:
        """Any object. A name may come twice, as it may in JSON."""
        lark, calls = self._lark, self._calls
        match calls.form:
            case "json":
                return lark.add("any_arguments", _write_json({"type": "object"}))
            case "braces":
                BracesGrammar(lark, calls.quote, "any", {}).write_any()
                return "any_object"
            case "xml":
                opened = lark.add("opened", lark.write(calls.parameter_open))
                value = self._write_text_value("any_arguments", "any_parameter", True)
                begins = [lark.write(begin) for begin in (calls.value_open, calls.json_value_open) if begin]
                key = f"{lark.add('KEY', KEY)} ({' | '.join(begins)})"
                lark.add("any_parameter", f"{key} {value}")
                return lark.add("any_arguments", f"{opened} any_parameter | {self._end}")
            case "python":
                member = f'{lark.add("KEY", KEY)} "=" {self._add_python_value()}'
                return lark.add("any_arguments", f'({member} (", " {member})*)?')

    # -- by a schema

    def _add_members(self, name: str, place: str, schema: dict[str, Any]) -> str:
        """Each property at most once, in their order, with what stands between them."""
        for keyword in _WHOLE:
            if keyword in schema:
                allowed = "none here: this model's format has arguments one by one, each by its own schema"
                raise SamplingParamsError(f"{place}.{keyword}", schema[keyword], allowed)
        properties = cast(dict[str, Any], schema.get("properties", {}))
        required = set(cast(list[str], schema.get("required", [])))
        if unknown := required - properties.keys():
            raise SamplingParamsError(f"{place}.required", sorted(unknown)[0], "names of its properties")
        if self._calls.form == "braces":
            braces = BracesGrammar(self._lark, self._calls.quote, name, schema)
            return f'"{{" {braces.add_members(name, place, schema)} "}}"'
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        if self._calls.form == "xml":
            return self._add_parameters(name, place, properties, required, shared)
        members = [
            (f'{quote(key)} "=" {self._write_python(f"{name}_{number}", value, shared)}', key in required)
            for number, (key, value) in enumerate(properties.items())
        ]
        return self._lark.add_chain(name, ", ", members)

    def _write_python(self, name: str, schema: Any, shared: dict[str, Any]) -> str:
        if schema == {"type": "boolean"}:
            return '("True" | "False")'
        return self._lark.add(name, _write_json(_as_dict(schema) | shared))

    # -- parameters between tags

    def _add_parameters(
        self, name: str, place: str, properties: dict[str, Any], required: set[str], shared: dict[str, Any]
    ) -> str:
        """A rule: parameters in their order and the call's end."""
        lark, opened = self._lark, self._lark.add("opened", self._lark.write(self._calls.parameter_open))
        ended = lark.add("ended", self._end)
        # What may follow a parameter, and what of it stands behind `parameter_open`.
        rest, following, may_end = ended, "", True
        for number, (key, schema) in reversed(list(enumerate(properties.items()))):
            where = f"{place}.properties.{key}"
            value = self._write_value(f"{name}_{number}", where, schema, shared, (rest, following, may_end))
            skipped = f" | {following}" if following and key not in required else ""
            following = lark.add(f"{name}_{number}f", f"{quote(key)} {value}{skipped}")
            may_end = may_end and key not in required
            end = f" | {ended}" if may_end else ""
            rest = lark.add(f"{name}_{number}r", f"{opened} {following}{end}")
        return rest

    def _write_value(
        self, name: str, place: str, schema: Any, shared: dict[str, Any], after: tuple[str, str, bool]
    ) -> str:
        """A value with what opens it and what follows. What may only be a text is read as it stands, all else
        as JSON.
        """
        opened = self._lark.write(self._calls.value_open)
        schema = resolve(_as_dict(schema), shared)
        values = cast(list[Any], [schema["const"]] if "const" in schema else schema.get("enum", []))
        if not list_types(schema, shared) <= {"string"}:
            made = schema | shared
            if not self._is_token(self._calls.parameter_close):
                made = _keep_tags_out(made)
            written = self._lark.add(name, _write_json(made))
            opened = self._lark.write(self._calls.json_value_open or self._calls.value_open)
        elif values:
            texts = " | ".join(quote(value) for value in values if isinstance(value, str))
            written = self._lark.add(name.upper(), texts)
        else:
            for keyword in (*_OF_TEXTS, *_WHOLE):
                if keyword in schema and keyword != "format":  # which says what a text is for
                    allowed = "none of a text: this model's format has texts as they are"
                    raise SamplingParamsError(f"{place}.{keyword}", schema[keyword], allowed)
            return f"{opened} {self._write_text_value(*after)}"
        close, has_tokens = self._lark.write(self._calls.parameter_close), self._has_tag_tokens
        return f"{opened} {written} {f'({close})?' if has_tokens else f'({close} | {_NEW_LINE})'} {after[0]}"

    def _write_text_value(self, rest: str, following: str, may_end: bool) -> str:
        """Any text and what follows, where what closes a parameter may be left out.

        rest: what may follow. following: of that, what stands behind `parameter_open`. may_end: it may be the
        end of the call.
        """
        calls, lark = self._calls, self._lark
        close, ends = calls.parameter_close.strip(), calls.close.split()
        space = lark.write(calls.parameter_close[len(calls.parameter_close.rstrip()) :])
        if self._has_tag_tokens:
            return f"{lark.any_token}* ({lark.write(close)} {space})? {rest}"
        cuts = [rf"\n{escape_text(calls.parameter_open)}", rf"\n{escape_text(ends[0])}"]
        if len(ends) > 1:
            whole = r"[ \t\r\n]*".join(map(escape_text, ends))
            cuts.append(rf"({whole}|\n{escape_text(ends[-1])})")
        text = lark.add("VALUE_TEXT", rf"{TEXT} & ~/(.|\n)*({'|'.join(cuts)})(.|\n)*/")
        lazy = [lark.add(f"cut_{number}[lazy]", f"{text} /{cut}/") for number, cut in enumerate(cuts)]
        for number, marker in enumerate((calls.parameter_open, ends[0])):
            if self._is_token(marker):  # which no text ends with
                lazy[number] = f"{text} {lark.write(marker)}"
        closed = f"{text} {lark.write(close)}"
        if not self._is_token(close):
            closed = lark.add("value_closed[lazy]", f"{text} {quote(close)}")
        choices = [f"{lark.add('value', f'{closed} {space}')} {rest}"]
        if following:
            choices.append(f"{lazy[0]} {following}")
        if may_end:
            ways = [f"{lazy[1]} {lark.write(calls.close[len(ends[0]) :])}", *lazy[2:]]
            if len(ends) > 1 and self._is_token(ends[-1]):
                ways.append(f"{text} {lark.write(ends[-1])}")
            choices.append(lark.add("cut_end", " | ".join(ways)))
        return f"({' | '.join(choices)})"

    @property
    def _has_tag_tokens(self) -> bool:
        markers = (self._calls.parameter_open, self._calls.parameter_close.strip())
        return all(map(self._is_token, markers))

    def _is_token(self, marker: str) -> bool:
        """Whether a marker begins with a token."""
        return isinstance(self._lark.split(marker)[0], int)

    # -- any value

    def _add_python_value(self) -> str:
        lark = self._lark
        lark.add("any_json", _write_json({}))
        lark.add("PYTHON_TEXT", r"/'([^'\\\n\x00-\x1f]|\\[\\'nt]){0,10000}'/")
        return lark.add("python_value", 'any_json | "True" | "False" | "None" | PYTHON_TEXT')


def _make_object_schema(place: str, value: dict[str, Any]) -> dict[str, Any]:
    schema = make_schema(place, value)
    kind = schema.get("type", "object")
    if kind != "object" and "object" not in kind:
        raise SamplingParamsError(f"{place}.type", kind, "'object': arguments have names")
    return schema | {"type": "object"}


def _keep_tags_out(schema: dict[str, Any]) -> dict[str, Any]:
    """The same for values whose texts hold no closing tag, which would end the parameter."""
    text = json.loads(to_json(schema))
    for _, part in list(list_schemas("", text)):
        if part.get("type") == "string" and not {"enum", "const"} & part.keys():
            part["allOf"] = [*part.get("allOf", []), {"type": "string", "pattern": _WITHOUT_TAGS}]
    return text


def _as_dict(schema: Any) -> dict[str, Any]:
    """A schema as an object."""
    return {} if schema is True else {"not": {}} if schema is False else schema


def _write_json(schema: dict[str, Any]) -> str:
    return f"%json {to_json(schema | _OPTIONS)}"


KEY = "/[A-Za-z_][A-Za-z0-9_.-]{0,63}/"  # names of arguments that no schema names
_SHAPES = {
    "type",
    "enum",
    "const",
    "anyOf",
    "$ref",
    "items",
    "minItems",
    "maxItems",
    "properties",
    "required",
}
# Of what is never written, or what says nothing of how something is written.
_UNUSED = {"additionalProperties", "patternProperties", "maxProperties", "format", "$defs", "definitions"}
_FOLLOWED = _SHAPES | _UNUSED | keywords.NUMBERS


class BracesGrammar:
    """Rules for values of one schema, in `lark`. mark: what stands before and behind a text.

    name: begins those of its rules. root: holds the schemas that are referred to.
    """

    def __init__(self, lark: LarkRules, mark: str, name: str, root: Mapping[str, Any]) -> None:
        self._lark = lark
        self._mark = mark
        self._name = name
        self._root = root
        self._references: dict[str, str] = {}  # pointer -> rule

    def write_any(self) -> str:
        """Any value."""
        lark = self._lark
        lark.add("NUMBER", r"/-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,15})?/")
        lark.add("KEY", KEY)
        member = lark.add("any_member", 'KEY ":" any_value')
        lark.add("any_object", f'"{{" ({member} ("," {member})*)? "}}"')
        lark.add("any_list", '"[" (any_value ("," any_value)*)? "]"')
        text = [self._write_text()] if self._mark else []
        words = ['"true"', '"false"', '"null"']
        return lark.add("any_value", " | ".join([*text, "NUMBER", *words, "any_object", "any_list"]))

    def write(self, name: str, place: str, schema: Any) -> str:
        """A value of a schema, by a rule `name`."""
        if not schema or schema is True:
            return self.write_any()
        schema = cast(dict[str, Any], schema)
        if unknown := schema.keys() - _FOLLOWED:
            keyword = sorted(unknown)[0]
            allowed = "no such keyword in a schema that is followed in this model's format of arguments"
            raise SamplingParamsError(f"{place}.{keyword}", schema[keyword], allowed)
        if "$ref" in schema:
            return self._refer(place, schema["$ref"])
        if "const" in schema or "enum" in schema:
            values = [schema["const"]] if "const" in schema else schema["enum"]
            return self._lark.add(name, " | ".join(map(self._write_constant, values)))
        if "anyOf" in schema:
            parts = [(f"{place}.anyOf[{i}]", branch) for i, branch in enumerate(schema["anyOf"])]
        else:
            types = schema.get("type", list(keywords.TYPES))
            parts = [(place, kind) for kind in ([types] if isinstance(types, str) else types)]
        choices: list[str] = []
        for number, (where, part) in enumerate(parts):
            below = f"{name}_{number}"
            choices.append(
                self._write_type(below, where, part, schema)
                if isinstance(part, str)
                else self.write(below, where, part)
            )
        return self._lark.add(name, " | ".join(choices))

    def _refer(self, place: str, pointer: str) -> str:
        if pointer not in self._references:
            group, _, target = pointer.removeprefix("#/").partition("/")
            schemas = self._root.get(group, {})
            if target not in schemas:
                raise SamplingParamsError(f"{place}.$ref", pointer, "a reference to one of $defs")
            rule = self._references[pointer] = f"{self._name}_reference_{len(self._references)}"
            self._lark.add(rule, self.write(f"{rule}_value", f"{place}.$ref", schemas[target]))
        return self._references[pointer]

    def _write_type(self, name: str, place: str, kind: str, schema: dict[str, Any]) -> str:
        match kind:
            case "string" if not self._mark:
                allowed = "none of a text: this model's format has nothing that texts stand within"
                raise SamplingParamsError(f"{place}.type", kind, allowed)
            case "string":
                return self._write_text()
            case "boolean":
                return '("true" | "false")'
            case "null":
                return '"null"'
            case "array":
                return self._write_list(name, place, schema)
            case "object":
                return f'"{{" {self.add_members(name, place, schema)} "}}"'
            case _:
                bounds = {key: value for key, value in schema.items() if key in keywords.NUMBERS}
                return f"%json {to_json({'type': kind, **bounds})}"

    def _write_list(self, name: str, place: str, schema: dict[str, Any]) -> str:
        item = self.write(f"{name}_item", f"{place}.items", schema.get("items"))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[]"'
        more = f'("," {item}){{{max(0, least - 1)},{"" if most is None else most - 1}}}' if most != 1 else ""
        return f'"[" {item} {more} "]"' if least else f'"[" ({item} {more})? "]"'

    def add_members(self, name: str, place: str, schema: dict[str, Any]) -> str:
        """A rule: the properties of an object, without its braces."""
        members: list[tuple[str, bool]] = []
        for number, (key, property_schema) in enumerate(schema.get("properties", {}).items()):
            value = self.write(f"{name}_{number}", f"{place}.properties.{key}", property_schema)
            members.append((f"{quote(key + ':')} {value}", key in schema.get("required", [])))
        return self._lark.add_chain(name, ",", members) if members else ""

    def _write_text(self) -> str:
        return f"({self._lark.write(self._mark)} {self._lark.add_text_until('quoted_text', self._mark)})"

    def _write_constant(self, value: Any) -> str:
        if isinstance(value, str):
            return self._lark.write(self._mark, value, self._mark)
        if isinstance(value, list | dict):
            raise SamplingParamsError("enum", value, "texts, numbers, true, false and null")
        return quote(to_json(value))
