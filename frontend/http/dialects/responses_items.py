"""What requests to /v1/responses have -> what a chat template takes: items -> messages, tools -> functions.

The assistant's items that follow each other (thoughts, text, calls) are one message, as the model wrote them.
The functions of a namespace (with Codex: an MCP server) have its name and their own joined as their name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast, get_args

import msgspec

from ....ipc.decoding import make_json_decoder
from ...formats.offered_tools import ToolFields, check_num_tools, join_names
from ...tools import Tool
from ..bodies.parsing import make_struct
from ..bodies.schema import ChatMessage, TextPart
from ..errors import FieldError, missing_field
from . import responses_body as body
from .conversation import MessageDraft

_TEXT_TYPES = ("input_text", "output_text", "text")
_THOUGHT_TYPES = ("reasoning_text", "summary_text", "text")
_check_object = make_json_decoder(dict[str, msgspec.Raw])
_KINDS = {str(kind.__struct_config__.tag): kind for kind in get_args(body.InputItem)}
_TOOL_KINDS = ("function", "namespace")
_TOOLS_ALLOWED = "'function' or 'namespace': tools that the client runs; this server has none of its own"


def read_items(items: str | list[dict[str, Any]], ignores_unknown: bool = False) -> list[body.InputItem]:
    """A request's `input`, checked one by one. Raises ApiErrors that name the place."""
    if isinstance(items, str):
        return [body.MessageItem(role="user", content=items)]
    if not items:
        raise FieldError("input", items, "a text, or a list of at least one item")
    for place, item in enumerate(items):
        if not isinstance(name := item.get("type", "message"), str) or name not in _KINDS:
            raise FieldError(f"input[{place}].type", name, f"one of {', '.join(_KINDS)}")
    typed = [item if "type" in item else {"type": "message", **item} for item in items]
    return make_struct({"input": typed}, body.InputItems, ignores_unknown).input


def make_messages(
    instructions: str | None, items: Sequence[body.ConversationItem], num_stored: int = 0
) -> list[ChatMessage]:
    """The conversation. The first `num_stored` items come from the store, the others from the request."""
    conversation = _Conversation()
    if instructions:
        conversation.add_system(instructions)
    for index, item in enumerate(items):
        conversation.add(item, f"input[{index - num_stored}]")
    return conversation.end()


def is_unfinished(item: body.ConversationItem) -> bool:
    """Whether an item at the end of a conversation is the beginning of the answer, which goes on."""
    return (
        isinstance(item, body.MessageItem)
        and item.role == "assistant"
        and item.status in ("in_progress", "incomplete")
    )


class _Conversation:
    """Messages as they are made. What is joined is collected first: a request may have many items."""

    def __init__(self) -> None:
        self._messages: list[ChatMessage] = []
        self._turn: MessageDraft | None = None  # what the assistant has said since somebody else has
        self._beginning: list[str] = []  # system messages before any other
        self._call_ids: set[str] = set()

    def add(self, item: body.ConversationItem, place: str) -> None:
        match item:
            case body.MessageItem(role="assistant", content=content):
                texts = [content] if isinstance(content, str) else _read_texts(content, f"{place}.content")
                self._assistant().texts += filter(None, texts)
            case body.ReasoningItem():
                self._assistant().thoughts += _read_thoughts(item, place)
            case body.FunctionCallItem(status="incomplete"):
                pass  # an answer's end cut it: nobody has run it, and no template takes half an object
            case body.FunctionCallItem():
                self._call_ids.add(item.call_id)
                _check_arguments(item, place)
                name = item.name if item.namespace is None else join_names(item.namespace, item.name)
                self._assistant().add_call(item.call_id, name, item.arguments)
            case body.MessageItem(role="user", content=content):
                self._say(ChatMessage(role="user", content=_read_content(content, f"{place}.content")))
            case body.MessageItem(content=content):
                texts = [content] if isinstance(content, str) else _read_texts(content, f"{place}.content")
                self.add_system("\n".join(texts))
            case body.FunctionCallOutputItem(call_id=call_id, output=output):
                if call_id not in self._call_ids:
                    allowed = "the call_id of a function_call before it, in `input` or the previous response"
                    raise FieldError(f"{place}.call_id", call_id, allowed)
                content = _read_content(output, f"{place}.output")
                self._say(ChatMessage(role="tool", content=content, tool_call_id=call_id))

    def add_system(self, text: str) -> None:
        """What a developer or the operator says; at the beginning all of it is one message.

        Many templates take one system message, and that at the beginning only.
        """
        if self._messages or self._turn is not None:
            self._say(ChatMessage(role="system", content=text))
        else:
            self._beginning.append(text)

    def end(self) -> list[ChatMessage]:
        self._say(None)
        return self._messages

    def _assistant(self) -> MessageDraft:
        if self._turn is None:
            self._begin()
            self._turn = MessageDraft("assistant")
        return self._turn

    def _say(self, message: ChatMessage | None) -> None:
        """Somebody else's word ends the assistant's turn."""
        self._begin()
        if self._turn is not None:
            self._messages.append(self._turn.finish(separator=""))
            self._turn = None
        if message is not None:
            self._messages.append(message)

    def _begin(self) -> None:
        if self._beginning:
            self._messages.append(ChatMessage(role="system", content="\n\n".join(self._beginning)))
            self._beginning = []


def _check_arguments(item: body.FunctionCallItem, place: str) -> None:
    try:
        if item.arguments:  # of a tool that takes none they may be ''
            _check_object(item.arguments)
    except (msgspec.DecodeError, RecursionError):
        raise FieldError(f"{place}.arguments", item.arguments, "the text of a JSON object") from None


def _read_thoughts(item: body.ReasoningItem, place: str) -> list[str]:
    if not (item.content or item.summary) and item.encrypted_content:
        allowed = "none without content: only the server that made it can read it"
        raise FieldError(f"{place}.encrypted_content", item.encrypted_content, allowed)
    if item.content:
        return _read_texts(item.content, f"{place}.content", _THOUGHT_TYPES)
    return _read_texts(item.summary, f"{place}.summary", _THOUGHT_TYPES)


def _read_content(content: str | list[TextPart], place: str) -> str | list[TextPart]:
    """A text as it is; parts as parts, for templates that take them."""
    if isinstance(content, str):
        return content
    return [TextPart(type="text", text=text) for text in _read_texts(content, place)]


def _read_texts(parts: list[TextPart], place: str, types: tuple[str, ...] = _TEXT_TYPES) -> list[str]:
    texts: list[str] = []
    for number, part in enumerate(parts):
        if part.type not in types:
            raise FieldError(f"{place}[{number}].type", part.type, f"'{types[0]}': only text is supported")
        if part.text is None:
            raise missing_field(f"{place}[{number}].text", "a text")
        texts.append(part.text)
    return texts


@dataclass(slots=True)
class ToolOffer:
    """What a request offers. given: in its own form, without what is left out. namespaces: by the name that
    the model knows, the namespace and the name in it. places: of `tools` in the request.
    """

    declared: list[body.OfferedTool] = field(default_factory=list[body.OfferedTool])
    tools: list[Tool] = field(default_factory=list[Tool])
    namespaces: dict[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    places: list[str] = field(default_factory=list[str])

    @property
    def fields(self) -> ToolFields:
        """What the request calls them."""
        return ToolFields(name="name", schema="parameters", places=self.places)


def read_offer(
    tools_field: Sequence[dict[str, Any]] | None, choice: object, ignores_unknown: bool = False
) -> ToolOffer:
    """A request's `tools`. Raises ApiErrors that name the place.

    A search of the web, which agents offer unasked, is left out unless a call of any tool is required.
    """
    may_leave_out = choice != "required"
    typed = [
        {"type": "web_search"} if may_leave_out and _is_web_search(tool) else _check_kind(tool, f"tools[{n}]")
        for n, tool in enumerate(tools_field or ())
    ]
    offer = ToolOffer()
    tools = make_struct({"tools": typed}, body.OfferedTools, ignores_unknown).tools
    for number, tool in enumerate(tools):
        if isinstance(tool, body.WebSearchTool):
            continue
        offer.declared.append(tool)
        check_num_tools(len(offer.tools) + (len(tool.tools) if isinstance(tool, body.NamespaceTool) else 1))
        for place, name, function in _find_functions(tool, f"tools[{number}]"):
            offer.places.append(place)
            offer.tools.append(Tool(name, function.description, function.parameters, bool(function.strict)))
            if isinstance(tool, body.NamespaceTool):
                offer.namespaces[name] = tool.name, function.name
    return offer


def _is_web_search(tool: dict[str, Any]) -> bool:
    """Whatever its date."""
    return str(tool.get("type")).startswith("web_search")


def _check_kind(tool: dict[str, Any], place: str) -> dict[str, Any]:
    if (kind := tool.get("type")) not in _TOOL_KINDS:
        raise FieldError(f"{place}.type", kind, _TOOLS_ALLOWED, "unsupported_tool")
    inner = tool.get("tools") if kind == "namespace" else None
    for number, inner_tool in enumerate(cast(list[Any], inner) if isinstance(inner, list) else ()):
        if (
            isinstance(inner_tool, dict)
            and (kind := cast(dict[str, Any], inner_tool).get("type")) != "function"
        ):
            raise FieldError(f"{place}.tools[{number}].type", kind, "'function'", "unsupported_tool")
    return tool


def _find_functions(tool: body.OfferedTool, place: str) -> Iterator[tuple[str, str, body.FunctionTool]]:
    """Each with its place and the name that the model knows."""
    if isinstance(tool, body.FunctionTool):
        yield place, tool.name, tool
        return
    for number, function in enumerate(tool.tools):
        yield f"{place}.tools[{number}]", join_names(tool.name, function.name), function
