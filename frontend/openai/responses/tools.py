"""Tools as a request to /v1/responses offers them -> the functions that the model is shown, and calls.

The functions of a namespace (with Codex: an MCP server) have its name and their own joined as their name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from ...output_formats.offered_tools import ToolFields, check_num_tools, join_names
from ...output_formats.tools import Tool
from ..bodies.parsing import make_struct
from ..bodies.responses import FunctionTool, NamespaceTool, OfferedTool, OfferedTools, WebSearchTool
from ..errors import FieldError

_KINDS = ("function", "namespace")
_ALLOWED = "'function' or 'namespace': tools that the client runs; this server has none of its own"


@dataclass(slots=True)
class ToolOffer:
    """What a request offers. given: in its own form, without what is left out. namespaces: by the name that
    the model knows, the namespace and the name in it. places: of `tools` in the request.
    """

    given: list[OfferedTool] = field(default_factory=list[OfferedTool])
    tools: list[Tool] = field(default_factory=list[Tool])
    namespaces: dict[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    places: list[str] = field(default_factory=list[str])

    @property
    def fields(self) -> ToolFields:
        """What the request calls them."""
        return ToolFields(name="name", schema="parameters", places=self.places)


def read_offer(
    given: Sequence[dict[str, Any]] | None, choice: object, kind: type[OfferedTools] = OfferedTools
) -> ToolOffer:
    """A request's `tools`. Raises ApiErrors that name the place.

    A search of the web, which agents offer unasked, is left out unless a call of any tool is required.
    """
    may_leave_out = choice != "required"
    typed = [
        {"type": "web_search"} if may_leave_out and _is_web_search(tool) else _check_kind(tool, f"tools[{n}]")
        for n, tool in enumerate(given or ())
    ]
    offer = ToolOffer()
    for number, one in enumerate(make_struct({"tools": typed}, kind).tools):
        if isinstance(one, WebSearchTool):
            continue
        offer.given.append(one)
        check_num_tools(len(offer.tools) + (len(one.tools) if isinstance(one, NamespaceTool) else 1))
        for place, name, function in _find_functions(one, f"tools[{number}]"):
            offer.places.append(place)
            offer.tools.append(Tool(name, function.description, function.parameters, bool(function.strict)))
            if isinstance(one, NamespaceTool):
                offer.namespaces[name] = one.name, function.name
    return offer


def _is_web_search(tool: dict[str, Any]) -> bool:
    """Whatever its date."""
    return str(tool.get("type")).startswith("web_search")


def _check_kind(tool: dict[str, Any], place: str) -> dict[str, Any]:
    if (kind := tool.get("type")) not in _KINDS:
        raise FieldError(f"{place}.type", kind, _ALLOWED, "unsupported_tool")
    inner = tool.get("tools") if kind == "namespace" else None
    for number, one in enumerate(cast(list[Any], inner) if isinstance(inner, list) else ()):
        if isinstance(one, dict) and (kind := cast(dict[str, Any], one).get("type")) != "function":
            raise FieldError(f"{place}.tools[{number}].type", kind, "'function'", "unsupported_tool")
    return tool


def _find_functions(tool: OfferedTool, place: str) -> Iterator[tuple[str, str, FunctionTool]]:
    """Each with its place and the name that the model knows."""
    if isinstance(tool, FunctionTool):
        yield place, tool.name, tool
        return
    for number, function in enumerate(tool.tools):
        yield f"{place}.tools[{number}]", join_names(tool.name, function.name), function
