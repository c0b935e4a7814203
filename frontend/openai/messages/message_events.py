"""An assistant's turn as Anthropic's blocks: events of a stream, and the blocks that they add up to.

Pure: what is said in which order, and neither where the turn comes from nor how it is sent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from ...output_formats.events import (
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from ..bodies import messages as body
from ..stream import encode_named_event

# Clients hand thoughts back with their signature, and may refuse those without one. Nobody checks ours.
SIGNATURE = "quire"
_NO_INPUT = msgspec.Raw(b"{}")
_Events = list[body.MessageEvent]
_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"?|[{}\[\],]', re.DOTALL)  # a text, as far as it goes, or a sign


class BlockWriter:
    """Output events, in their order -> events of blocks, of which one is open at a time.

    shows_thinking: thoughts are told, and not only that there were some.
    """

    def __init__(self, shows_thinking: bool = True) -> None:
        self.has_called = False  # a call is complete
        self._shows_thinking = shows_thinking
        self._index = 0  # of the open block, or the next
        self._open: type[body.Block] | None = None
        self._blank = ""  # white space that no block has: before a call nobody wants it

    def take(self, event: OutputEvent) -> _Events:
        """What is to be said of the turn's next event."""
        match event:
            case TextDelta(text):
                return self._take_text(text)
            case ReasoningDelta(text):
                return self._take_thoughts(text)
            case ToolCallStart(_, call_id, name):
                return self._begin(body.ToolUseBlock(id=call_id, name=name, input=_NO_INPUT))
            case ToolCallDelta(_, arguments):
                return [self._delta(body.InputJsonDelta(partial_json=arguments))] if arguments else []
            case ToolCallEnd():
                self.has_called = True
                return self._stop()

    def end(self) -> _Events:
        """The turn has ended, in whatever block."""
        if self._index == 0 and self._open is None and self._blank:
            block, delta = body.TextBlock(text=""), body.TextDelta(text=self._blank)
            return [*self._begin(block), self._delta(delta), *self._stop()]
        return self._stop()

    def _take_text(self, text: str) -> _Events:
        if self._open is body.TextBlock:
            return [self._delta(body.TextDelta(text=text))] if text else []
        text = self._blank + text
        if not text.strip():
            self._blank = text
            return []
        return [*self._begin(body.TextBlock(text="")), self._delta(body.TextDelta(text=text))]

    def _take_thoughts(self, text: str) -> _Events:
        events: _Events = []
        if self._open is not body.ThinkingBlock:
            events += self._begin(body.ThinkingBlock(thinking="", signature=""))
        if self._shows_thinking and text:
            events.append(self._delta(body.ThinkingDelta(thinking=text)))
        return events

    def _begin(self, block: body.Block) -> _Events:
        events = self._stop()
        self._open, self._blank = type(block), ""
        return [*events, body.ContentBlockStart(index=self._index, content_block=block)]

    def _stop(self) -> _Events:
        if self._open is None:
            return []
        events: _Events = [body.ContentBlockStop(index=self._index)]
        if self._open is body.ThinkingBlock:
            events.insert(0, self._delta(body.SignatureDelta(signature=SIGNATURE)))
        self._open = None
        self._index += 1
        return events

    def _delta(self, delta: body.Delta) -> body.ContentBlockDelta:
        return body.ContentBlockDelta(index=self._index, delta=delta)


def collect_blocks(events: Iterable[body.MessageEvent]) -> list[body.Block]:
    """The blocks of a whole answer. A call that was cut off has what was complete of its input."""
    blocks: list[body.Block] = []
    texts: list[str] = []
    for event in events:
        match event:
            case body.ContentBlockStart(content_block=block):
                texts = []
                blocks.append(block)
            case body.ContentBlockDelta(delta=delta) if not isinstance(delta, body.SignatureDelta):
                texts += msgspec.structs.astuple(delta)
            case body.ContentBlockStop():
                blocks[-1] = _fill(blocks[-1], "".join(texts))
            case _:
                pass
    return blocks


def _fill(block: body.Block, text: str) -> body.Block:
    match block:
        case body.TextBlock():
            return body.TextBlock(text=text)
        case body.ThinkingBlock():
            return body.ThinkingBlock(thinking=text, signature=SIGNATURE)
        case body.ToolUseBlock():
            return body.ToolUseBlock(id=block.id, name=block.name, input=_read_input(text))


def _read_input(text: str) -> msgspec.Raw:
    for data in (text or "{}", _close(text)):
        try:
            msgspec.json.decode(data, type=dict[str, msgspec.Raw])
            return msgspec.Raw(data.encode())
        except (msgspec.MsgspecError, RecursionError):
            pass
    return _NO_INPUT


def _close(text: str) -> str:
    """The beginning of a JSON object, up to the last value in it that is complete, as an object."""
    end, closers = 0, list[str]()  # of what is complete, and what is open there
    ends: list[str] = []  # of the objects and lists that are open, the innermost last
    for token in _JSON_TOKEN.finditer(text):
        sign = token[0]
        if sign in ("{", "["):
            ends.append("}" if sign == "{" else "]")
        elif sign in ("}", "]") and ends:
            ends.pop()
        if sign in ("}", "]", ","):
            end, closers = token.start() if sign == "," else token.end(), ends[::-1]
    return text[:end] + "".join(closers)


def encode_events(events: Iterable[body.MessageEvent]) -> bytes:
    """Server-sent events, each named as its data's type."""
    return b"".join([encode_named_event(_name_of(event), event) for event in events])


def _name_of(event: body.MessageEvent) -> str:
    tag: Any = type(event).__struct_config__.tag
    return tag
