"""Requests of a stress run that are conversations: tools are offered, or thoughts asked for. Pure.

What a request owes is compared as one text, in which parts have an order of their own: a stream may have
text behind a call.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ...frontend.events import AssistantMessage, ToolCall


def _define(name: str, description: str, parameter: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]}
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


TOOLS = [
    _define("calculator", "Calculates an expression.", "expression"),
    _define("lookup", "Looks up a fact.", "key"),
]
QUESTIONS = (
    "What is 12 plus 30?",
    "What is 123 times 45?",
    "What is the capital of France?",
    "What is the age of Mia, and what is 7 minus 2?",
)
_BETWEEN = "\x1e"  # parts of an answer, which no model here writes


class Chat(msgspec.Struct, frozen=True):
    """What a conversation asks for beside its text, which is a user's message."""

    tool_choice: str | None = None  # None: no tools are offered
    is_thinking: bool = False

    @property
    def fields(self) -> dict[str, Any]:
        """As LLM.chat and /v1/chat/completions take them."""
        tools = {"tools": TOOLS, "tool_choice": self.tool_choice} if self.tool_choice is not None else {}
        return {**tools, "chat_template_kwargs": {"enable_thinking": self.is_thinking}}


def list_chats(has_tools: bool, has_thoughts: bool) -> list[Chat]:
    """What a model that can do so much is asked for."""
    choices = ["auto", "required"] if has_tools else []
    return [
        Chat(choice, is_thinking)
        for is_thinking in ((False, True) if has_thoughts else (False,))
        for choice in (choices + [None] * is_thinking)
    ]


def join_message(message: AssistantMessage) -> str:
    """A whole answer: thoughts, text and calls, as far as there are any."""
    calls = [f"{call.name} {call.arguments}" for call in message.tool_calls]
    return _BETWEEN.join(filter(None, [message.reasoning, message.content, *calls]))


def is_beginning(text: str, whole: str) -> bool:
    """Whether an answer that was left in the middle has only beginnings of the parts of `whole`."""
    owed = whole.split(_BETWEEN)
    return all(any(part.startswith(piece) for part in owed) for piece in text.split(_BETWEEN))


class Function(msgspec.Struct):
    """What is new of a call's function."""

    name: str | None = None
    arguments: str | None = None


class DeltaCall(msgspec.Struct):
    """What is new of a call."""

    index: int
    function: Function


class Delta(msgspec.Struct):
    """What is new in a chunk of a streamed chat."""

    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[DeltaCall] | None = None


class DeltaJoiner:
    """The deltas of a stream -> the text that `join_message` gives of what has come."""

    def __init__(self) -> None:
        self._message = AssistantMessage()

    def take(self, delta: Delta) -> str:
        """All of the text so far."""
        message = self._message
        message.content += delta.content or ""
        message.reasoning += delta.reasoning_content or ""
        for call in delta.tool_calls or ():
            if call.function.name is not None:
                message.tool_calls.append(ToolCall("", call.function.name))
            message.tool_calls[call.index].arguments += call.function.arguments or ""
        return join_message(message)
