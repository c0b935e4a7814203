"""ArgumentsGrammar: what stands for a call's arguments in each form, for any object and for a schema.

Only JSON is followed by llguidance as a whole. In other forms arguments are written one by one, each by the
schema of its property and in the schema's order; a schema that says more is refused with its place.
"""

from __future__ import annotations

import json
from typing import Any, cast

from ....ipc.errors import SamplingParamsError
from ...structured_outputs.grammar_text import WHITESPACE_PATTERN, quote, to_json
from ...structured_outputs.json_schema import make_schema
from ...structured_outputs.strict_schema import list_schemas
from ..output_format import CallFormat
from ..schema_types import list_types, resolve
from .braces_grammar import KEY, BracesGrammar
from .lark import LarkRules
from .rules import ToolRule

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
        self.schemas: dict[str, dict[str, Any]] = {}

    def add(self, tool: ToolRule) -> str:
        """What a rule of a call has for the arguments of a tool; '' for nothing."""
        form = self._calls.form
        if not tool.takes_arguments:
            return "" if form in ("xml", "python") else '"{}"'
        if tool.parameters is None:
            return self._add_any()
        if tool.place not in self._names:
            self._names[tool.place] = self._add_schema(tool.place, tool.parameters)
        return self._names[tool.place]

    def _add_schema(self, place: str, parameters: dict[str, Any]) -> str:
        schema = _make_object_schema(place, parameters)
        name = f"arguments_{len(self._names)}"
        self.schemas[place] = schema
        if self._calls.form == "json":
            return self._lark.add(name, _write_json(schema))
        return self._add_members(name, place, schema)

    def _add_any(self) -> str:
        """Any object. A name may come twice, as it may in JSON."""
        lark = self._lark
        match self._calls.form:
            case "json":
                return lark.add("any_arguments", _write_json({"type": "object"}))
            case "braces":
                BracesGrammar(lark, self._calls.quote, "any", {}).write_any()
                return "any_object"
            case "xml":
                member = self._write_member(lark.add("KEY", KEY), self._write_any_text())
                return lark.add("any_arguments", f"({member})*")
            case "python":
                member = self._write_member(lark.add("KEY", KEY), self._add_python_value())
                return lark.add("any_arguments", f'({member} (", " {member})*)?')

    def _write_member(self, key: str, value: str) -> str:
        """One argument. key: as a rule has it."""
        calls, write = self._calls, self._lark.write
        if calls.form == "python":
            return f'{key} "=" {value}'
        return f"{write(calls.parameter_open)} {key} {write(calls.value_open)} {value}"

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
        members: list[tuple[str, bool]] = []
        for number, (key, one) in enumerate(properties.items()):
            where = f"{place}.properties.{key}"
            value = self._write_value(f"{name}_{number}", where, one, shared)
            members.append((self._write_member(quote(key), value), key in required))
        if self._calls.form == "python":
            return self._lark.add_chain(name, ", ", members)
        return self._lark.add(name, " ".join(f"({one}){'' if needed else '?'}" for one, needed in members))

    def _write_value(self, name: str, place: str, schema: Any, shared: dict[str, Any]) -> str:
        if self._calls.form == "xml":
            return self._write_xml(name, place, schema, shared)
        if schema == {"type": "boolean"}:
            return '("True" | "False")'
        return self._lark.add(name, _write_json(_as_dict(schema) | shared))

    def _write_xml(self, name: str, place: str, schema: Any, shared: dict[str, Any]) -> str:
        """A value and what closes it. What may only be a text is read as it stands, all else as JSON."""
        schema = resolve(_as_dict(schema), shared)
        close = self._lark.write(self._calls.parameter_close)
        if not list_types(schema, shared) <= {"string"}:
            made = schema | shared
            if isinstance(self._lark.split(self._calls.parameter_close)[0], str):
                made = _keep_tags_out(made)
            return f"{self._lark.add(name, _write_json(made))} {close}"
        values = cast(list[Any], [schema["const"]] if "const" in schema else schema.get("enum", []))
        if values:
            texts = " | ".join(quote(value) for value in values if isinstance(value, str))
            return f"{self._lark.add(name.upper(), texts)} {close}"
        for keyword in (*_OF_TEXTS, *_WHOLE):
            if keyword in schema and keyword != "format":  # which says what a text is for
                allowed = "none of a text: this model's format has texts as they are"
                raise SamplingParamsError(f"{place}.{keyword}", schema[keyword], allowed)
        return self._write_any_text()

    def _write_any_text(self) -> str:
        """Any text, and what closes a parameter."""
        close = self._calls.parameter_close
        end = self._lark.write(close[len(close.rstrip()) :])
        return f"{self._lark.add_text_until('parameter_text', close)} {end}"

    # -- any value

    def _add_python_value(self) -> str:
        lark = self._lark
        lark.add("any_json", _write_json({}))
        lark.add("PYTHON_TEXT", r"/'([^'\\\n\x00-\x1f]|\\[\\'nt]){0,10000}'/")
        return lark.add("python_value", 'any_json | "True" | "False" | "None" | PYTHON_TEXT')


def _make_object_schema(place: str, value: dict[str, Any]) -> dict[str, Any]:
    schema = make_schema(place, value)
    given = schema.get("type", "object")
    if given != "object" and "object" not in given:
        raise SamplingParamsError(f"{place}.type", given, "'object': arguments have names")
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
