"""Items of a conversation, as a request or the store has them -> the messages that a chat template takes.

The assistant's items that follow each other (thoughts, text, calls) are one message, as the model wrote them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import msgspec

from ...output_formats.offered_tools import join_names
from ..bodies.parsing import make_struct
from ..bodies.responses import (
    ConversationItem,
    FunctionCallItem,
    FunctionCallOutputItem,
    InputItem,
    InputItems,
    MessageItem,
    ReasoningItem,
)
from ..bodies.schema import ChatMessage, TextPart
from ..errors import FieldError

_TEXT_TYPES = ("input_text", "output_text", "text")
_THOUGHT_TYPES = ("reasoning_text", "summary_text", "text")
_check_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_KINDS = {str(kind.__struct_config__.tag): kind for kind in get_args(InputItem)}


def read_items(given: str | list[dict[str, Any]], kind: type[InputItems] = InputItems) -> list[InputItem]:
    """A request's `input`, checked one by one. Raises ApiErrors that name the place."""
    if isinstance(given, str):
        return [MessageItem(role="user", content=given)]
    if not given:
        raise FieldError("input", given, "a text, or a list of at least one item")
    for place, item in enumerate(given):
        if not isinstance(name := item.get("type", "message"), str) or name not in _KINDS:
            raise FieldError(f"input[{place}].type", name, f"one of {', '.join(_KINDS)}")
    typed = [item if "type" in item else {"type": "message", **item} for item in given]
    return make_struct({"input": typed}, kind).input


def make_messages(
    instructions: str | None, items: Sequence[ConversationItem], num_stored: int = 0
) -> list[ChatMessage]:
    """The conversation. The first `num_stored` items come from the store, the others from the request."""
    conversation = _Conversation()
    if instructions:
        conversation.add_system(instructions)
    for index, item in enumerate(items):
        conversation.add(item, f"input[{index - num_stored}]")
    return conversation.end()


def is_unfinished(item: ConversationItem) -> bool:
    """Whether an item at the end of a conversation is the beginning of the answer, which goes on."""
    return (
        isinstance(item, MessageItem)
        and item.role == "assistant"
        and item.status in ("in_progress", "incomplete")
    )


@dataclass(slots=True)
class _Turn:
    """What the assistant has said since somebody else has."""

    texts: list[str] = field(default_factory=list[str])
    thoughts: list[str] = field(default_factory=list[str])
    calls: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def make_message(self) -> ChatMessage:
        text = "".join(self.texts)
        return ChatMessage(
            role="assistant",
            content=None if self.calls and not text else text,
            reasoning_content="\n".join(self.thoughts) or None,
            tool_calls=self.calls or None,
        )


class _Conversation:
    """Messages as they are made. What is joined is collected first: a request may have many items."""

    def __init__(self) -> None:
        self._messages: list[ChatMessage] = []
        self._turn: _Turn | None = None
        self._beginning: list[str] = []  # system messages before any other
        self._call_ids: set[str] = set()

    def add(self, item: ConversationItem, place: str) -> None:
        match item:
            case MessageItem(role="assistant", content=content):
                texts = [content] if isinstance(content, str) else _read_texts(content, f"{place}.content")
                self._assistant().texts += texts
            case ReasoningItem():
                self._assistant().thoughts += _read_thoughts(item, place)
            case FunctionCallItem(status="incomplete"):
                pass  # an answer's end cut it: nobody has run it, and no template takes half an object
            case FunctionCallItem():
                self._call_ids.add(item.call_id)
                self._assistant().calls.append(_read_call(item, place))
            case MessageItem(role="user", content=content):
                self._say(ChatMessage(role="user", content=_read_content(content, f"{place}.content")))
            case MessageItem(content=content):
                texts = [content] if isinstance(content, str) else _read_texts(content, f"{place}.content")
                self.add_system("\n".join(texts))
            case FunctionCallOutputItem(call_id=call_id, output=output):
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

    def _assistant(self) -> _Turn:
        if self._turn is None:
            self._begin()
            self._turn = _Turn()
        return self._turn

    def _say(self, message: ChatMessage | None) -> None:
        """Somebody else's word ends the assistant's turn."""
        self._begin()
        if self._turn is not None:
            self._messages.append(self._turn.make_message())
            self._turn = None
        if message is not None:
            self._messages.append(message)

    def _begin(self) -> None:
        if self._beginning:
            self._messages.append(ChatMessage(role="system", content="\n\n".join(self._beginning)))
            self._beginning = []


def _read_call(item: FunctionCallItem, place: str) -> dict[str, Any]:
    try:
        if item.arguments:  # of a tool that takes none they may be ''
            _check_object(item.arguments)
    except (msgspec.DecodeError, RecursionError):
        raise FieldError(f"{place}.arguments", item.arguments, "the text of a JSON object") from None
    name = item.name if item.namespace is None else join_names(item.namespace, item.name)
    function = {"name": name, "arguments": item.arguments}
    return {"id": item.call_id, "type": "function", "function": function}


def _read_thoughts(item: ReasoningItem, place: str) -> list[str]:
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
            raise FieldError(f"{place}[{number}].text", None, "a text")
        texts.append(part.text)
    return texts
