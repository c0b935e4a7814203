"""What an assistant's turn consists of: events while it is generated, and the message they add up to."""

from __future__ import annotations

import msgspec


class TextDelta(msgspec.Struct, frozen=True):
    """More of the answer's text."""

    text: str


class ReasoningDelta(msgspec.Struct, frozen=True):
    """More of the model's thoughts."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True):
    """A call begins. index: counts the turn's calls from 0. call_id: what its result will be told by."""

    index: int
    call_id: str
    name: str


class ToolCallDelta(msgspec.Struct, frozen=True):
    """More of a call's arguments, which are a JSON object's text when all are joined."""

    index: int
    arguments: str


class ToolCallEnd(msgspec.Struct, frozen=True):
    """A call's arguments are complete."""

    index: int


OutputEvent = TextDelta | ReasoningDelta | ToolCallStart | ToolCallDelta | ToolCallEnd


class ToolCall(msgspec.Struct):
    """A call of a tool. arguments: a JSON object's text."""

    call_id: str
    name: str
    arguments: str = ""


class AssistantMessage(msgspec.Struct):
    """A turn, as far as it was generated."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = []

    def add(self, event: OutputEvent) -> None:
        """Take the turn's next event."""
        match event:
            case TextDelta(text):
                self.content += text
            case ReasoningDelta(text):
                self.reasoning += text
            case ToolCallStart(_, call_id, name):
                self.tool_calls.append(ToolCall(call_id, name))
            case ToolCallDelta(index, arguments):
                self.tool_calls[index].arguments += arguments
            case ToolCallEnd():
                pass
