"""BracesGrammar: values as Gemma writes them, by a JSON schema. {city:<escape>Rome<escape>,days:2}"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from ....ipc.errors import SamplingParamsError
from ...structured_outputs import keywords
from ...structured_outputs.grammar_text import quote, to_json
from .lark import LarkRules

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
            parts = [(f"{place}.anyOf[{i}]", one) for i, one in enumerate(schema["anyOf"])]
        else:
            types = schema.get("type", list(keywords.TYPES))
            parts = [(place, one) for one in ([types] if isinstance(types, str) else types)]
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
        for number, (key, one) in enumerate(schema.get("properties", {}).items()):
            value = self.write(f"{name}_{number}", f"{place}.properties.{key}", one)
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
