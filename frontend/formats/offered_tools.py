"""The tools and the choice of a request, read from OpenAI's form and checked, for every API."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from ...ipc.errors import InputError, did_you_mean
from ..tools import Tool, ToolChoice

MAX_TOOLS = 256  # agents with several MCP servers offer more than OpenAI's 128
MAX_NAME_LENGTH = 128  # Anthropic's; OpenAI's is 64, without the namespace
_NAME = re.compile(rf"[a-zA-Z0-9_-]{{1,{MAX_NAME_LENGTH}}}")
_NAME_ALLOWED = f"1 to {MAX_NAME_LENGTH} of the characters a-z, A-Z, 0-9, _ and -"
_TOOL_ALLOWED = 'an object {"type": "function", "function": {"name": ..., "parameters": ...}}'
_CHOICE_ALLOWED = (
    '\'none\', \'auto\', \'required\', an object {"type": "function", "function": {"name": ...}}, '
    'or {"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [...]}}'
)
_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")


class ToolFields(NamedTuple):
    """What an API calls its fields. name, schema: within an entry of `tools`. places: of the tools, where
    they are not the entries of `tools`, one by one.
    """

    tools: str = "tools"
    name: str = "function.name"
    schema: str = "function.parameters"
    choice: str = "tool_choice"
    places: Sequence[str] | None = None

    def find_place(self, number: int) -> str:
        """The place of a tool."""
        return f"{self.tools}[{number}]" if self.places is None else self.places[number]


CHAT_FIELDS = ToolFields()


def check_tools(tools: Sequence[Tool], choice: ToolChoice, fields: ToolFields = CHAT_FIELDS) -> None:
    """What can be seen of tools without reading their schemas. Raises InputError."""
    check_num_tools(len(tools), fields.tools)
    places: dict[str, int] = {}
    for number, tool in enumerate(tools):
        place = f"{fields.find_place(number)}.{fields.name}"
        if not _NAME.fullmatch(tool.name):
            raise InputError(place, tool.name, _NAME_ALLOWED)
        if tool.name in places:
            other = f"{fields.find_place(places[tool.name])}.{fields.name}"
            raise InputError(place, tool.name, f"a name that no other tool has: {other} is the same")
        places[tool.name] = number
        kind = "object" if tool.parameters is None else tool.parameters.get("type", "object")
        if kind != "object":
            raise InputError(f"{fields.find_place(number)}.{fields.schema}.type", kind, "'object'")
    for name in choice.names or ():
        if name not in places:
            allowed = f"one of the tools: {', '.join(places) or 'there are none'}{did_you_mean(name, places)}"
            raise InputError(fields.choice, name, allowed)
    if choice.mode == "required" and not tools:
        raise InputError(fields.choice, "required", f"'none' or 'auto' without {fields.tools}")


def list_unfollowed(tools: Sequence[Tool], choice: ToolChoice, fields: ToolFields = CHAT_FIELDS) -> list[str]:
    """For each tool the place of its schema, if no grammar will follow it; else ''."""

    def is_followed(tool: Tool) -> bool:
        may_be_called = choice.mode != "none" and (choice.names is None or tool.name in choice.names)
        return may_be_called and (tool.strict or choice.mode == "required")

    return [
        "" if is_followed(tool) else f"{fields.find_place(number)}.{fields.schema}"
        for number, tool in enumerate(tools)
    ]


def check_num_tools(num_tools: int, field: str = "tools") -> None:
    """Raise InputError for more than MAX_TOOLS, before time is spent on them."""
    if num_tools > MAX_TOOLS:
        raise InputError(field, f"{num_tools} tools", f"at most {MAX_TOOLS}")


def join_names(namespace: str, name: str) -> str:
    """What a model knows a tool of a namespace by."""
    return f"{namespace}__{name}"


def read_tools(value: Any) -> list[Tool]:
    """Tools as Python's users write them: OpenAI's objects. Raises InputError."""
    if value is None:
        return []
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Sequence):
        raise InputError("tools", value, f"a list of tools, each {_TOOL_ALLOWED}")
    return [_read_tool(f"tools[{number}]", tool) for number, tool in enumerate(cast(Sequence[Any], value))]


def read_tool_choice(value: Any, field: str = "tool_choice") -> ToolChoice:
    """OpenAI's tool_choice; a function's name may stand in an object 'function', as in chats, or beside its
    type, as in responses, where it may have a namespace. Mistral's "any" is "required"; Anthropic's objects
    have each word as a type. Raises InputError.
    """
    match value:
        case None | "auto" | {"type": "auto"}:
            return ToolChoice()
        case "required" | "any" | {"type": "required" | "any"}:
            return ToolChoice("required")
        case "none" | {"type": "none"}:
            return ToolChoice("none")
        case {"type": "tool", "name": str(name)}:
            return ToolChoice("required", frozenset([name]))
        case {"type": "function"}:
            return ToolChoice("required", frozenset([_read_name(field, value)]))
        case {"type": "allowed_tools"}:
            return _read_allowed(field, value.get("allowed_tools", value))
        case _:
            raise InputError(field, value, _CHOICE_ALLOWED)


def _read_allowed(field: str, value: Any) -> ToolChoice:
    match value:
        case {"mode": "auto" | "required" as mode, "tools": [_, *_] as tools}:
            check_num_tools(len(tools), f"{field}.tools")
            names = [_read_name(f"{field}.tools[{number}]", tool) for number, tool in enumerate(tools)]
            return ToolChoice(mode, frozenset(names))
        case _:
            raise InputError(field, value, _CHOICE_ALLOWED)


def _read_name(field: str, value: Any) -> str:
    match value:
        case {"type": "function", "namespace": str(namespace), "name": str(name)}:
            _check_keys(field, value, ("type", "namespace", "name"))
            return join_names(namespace, name)
        case {"type": "function", "function": {"name": str(name)} as function}:
            _check_keys(field, value, ("type", "function"))
            _check_keys(f"{field}.function", cast(Mapping[str, Any], function), ("name",))
            return name
        case {"type": "function", "name": str(name)}:
            _check_keys(field, value, ("type", "name"))
            return name
        case _:
            raise InputError(field, value, 'an object {"type": "function", "function": {"name": ...}}')


def _read_tool(place: str, value: Any) -> Tool:
    match value:
        case {"type": "function", "function": Mapping() as function} if len(value) == 2:
            pass
        case _:
            raise InputError(place, value, _TOOL_ALLOWED)
    values = cast(Mapping[str, Any], function)
    _check_keys(f"{place}.function", values, _FUNCTION_FIELDS)
    _check_type(f"{place}.function.name", values.get("name"), str, "a text")
    for name, kind, allowed in (
        ("description", str, "a text"),
        ("parameters", dict, "a JSON schema"),
        ("strict", bool, "True or False"),
    ):
        if values.get(name) is not None:
            _check_type(f"{place}.function.{name}", values[name], kind, allowed)
    return Tool(
        values["name"], values.get("description"), values.get("parameters"), bool(values.get("strict"))
    )


def _check_keys(place: str, fields: Mapping[str, Any], known: Sequence[str]) -> None:
    for name in fields:
        if name not in known:
            allowed = f"one of {', '.join(known)}{did_you_mean(name, known)}"
            raise InputError(f"{place}.{name}", fields[name], allowed)


def _check_type(field: str, value: Any, kind: type, allowed: str) -> None:
    if not isinstance(value, kind):
        raise InputError(field, value, allowed)


# Which JSON types a schema allows. Understands what names types and refers to them, nothing else.

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
