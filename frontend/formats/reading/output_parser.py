"""An output while it is generated -> thoughts, content and calls, by its format's description.

Knows no API and no request. A marker that is a token is told from text that looks like it (marked_text.py).

- In thoughts only their end is a marker, and calls that the turn ends with. In a text within a call's
  arguments every marker is text.
- Markers never reach content, nor does white space around them. One that stands where it means nothing is
  left out, unless it is several tokens: that is text.
- Models leave markers out and write some twice. What still begins as a call of an offered tool has to is read
  as one; no other text is.
- A call that cannot be read stays content, whole. Its name is told once it is complete, is that of an offered
  tool, and the arguments have begun as they should. What is told stays told, so arguments that go wrong later
  end there, and the rest of the call is content. Either counts in `num_errors`.
- A call that the end of the output cuts before its name is told is content; after that, its arguments are
  what there is, and no ToolCallEnd comes. It is an error if the model itself ended the turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from ...events import OutputEvent, ReasoningDelta, TextDelta, ToolCallDelta
from ...tools import Tool
from ..output_format import OutputFormat, is_reasoning_open
from .call_reader import CallReader
from .lexicon import ChannelLexicon, load_lexicon
from .marked_text import MarkedText
from .text_source import Steps, Stop, TextSource, Unreadable
from .tool_call import CallWriter

if TYPE_CHECKING:
    from ...text.tokenizer import Tokenizer


_MAX_HEADER = 200  # characters of one that does not end
_MAX_REWOUND = (
    200_000  # characters; an output in which so much looked like calls and was none is text from there on
)


class OutputParser:
    """Reads one output in a bound format; without tools no call is looked for.

    num_errors: calls that could not be read.
    """

    def __init__(
        self,
        output_format: OutputFormat,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        tools: Sequence[Tool] = (),
    ) -> None:
        self._lexicon = load_lexicon(output_format, tokenizer, bool(tools))
        self._marked = MarkedText(self._lexicon.marks)
        self._source = TextSource()
        self._events: list[OutputEvent] = []
        self._tools = {tool.name: tool for tool in tools}
        calls = self._lexicon.format.calls
        self._calls = CallReader(self._source, calls, self._lexicon) if calls else None
        self._is_bare = calls is not None and calls.is_bare
        self._has_short_ids = bool(calls and calls.call_id_open)
        self._num_calls = 0
        self._has_content = False
        self._last_token_id: int | None = None
        self._thoughts_begin: int | None = None  # tokens before the thoughts that are open
        self._num_past_reasoning_tokens = 0
        self.num_errors = 0
        is_open = is_reasoning_open(output_format, prompt_token_ids)
        self._steps = self._read_messages() if self._lexicon.channels else self._read_turn(is_open)

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of thoughts so far, without their markers.

        Where a marker is several tokens, its place is known as exactly as deltas are short.
        """
        begin = self._thoughts_begin
        return self._num_past_reasoning_tokens + (0 if begin is None else self._marked.num_tokens - begin)

    def take(self, text: str, token_ids: Sequence[int], is_finished: bool) -> list[OutputEvent]:
        """The next delta of the output, whose text may be late; what became known by it."""
        if token_ids:
            self._last_token_id = token_ids[-1]
        is_cut = is_finished and self._last_token_id not in self._lexicon.format.hidden_ids
        self._source.add(self._marked.take(text, token_ids, is_finished), is_finished, is_cut)
        next(self._steps, None)
        events = list(_merge(self._events)) if len(self._events) > 1 else self._events[:]
        self._events.clear()
        return events

    def _read_turn(self, is_reasoning: bool) -> Steps[None]:
        lexicon, source = self._lexicon, self._source
        if is_reasoning:
            self._thoughts_begin = 0
            yield from self._read_thoughts(lexicon.thinking_stop)
            yield from source.skip_space()
        while True:
            if self._is_bare and not self._has_content:
                yield from self._read_calls("")
            marker = yield from source.read_until(lexicon.content_stop, self._emit_text)
            if not marker:
                return
            if lexicon.thinking_open and marker == lexicon.thinking_open[0]:
                yield from self._open_thoughts(marker)
            elif marker in lexicon.call_openers:
                yield from self._read_calls(marker)
            elif marker in lexicon.bare_openers:
                yield from self._read_unmarked(marker)
            else:
                yield from source.skip_space()

    def _open_thoughts(self, marker: str) -> Steps[None]:
        begin = self._marked.num_tokens_before(self._source.place - len(marker)) + 1
        for piece in self._lexicon.thinking_open[1:]:
            yield from self._source.skip_space()
            if not (yield from self._source.accept(piece)):
                return
        self._thoughts_begin = min(begin, self._marked.num_tokens)
        yield from self._read_thoughts(self._lexicon.thinking_stop)
        yield from self._source.skip_space()

    def _read_thoughts(self, stop: Stop) -> Steps[str]:
        """Read thoughts and what closes them, or calls that the turn ends with before they are closed."""
        source, lexicon = self._source, self._lexicon
        yield from source.skip_space()
        while True:
            marker = yield from source.read_until(stop, self._emit_reasoning)
            space = source.dropped_space
            is_opener = marker in lexicon.call_openers or marker in lexicon.named_openers
            if not marker or not is_opener or lexicon.channels:
                break
            end = self._marked.num_tokens_before(source.place - len(marker))
            if (yield from self._read_last_calls(marker)):
                self._end_thoughts(end)
                return marker
            self._emit_reasoning(space + marker)
            source.position += len(marker)
        if marker:
            self._end_thoughts(self._marked.num_tokens_before(source.place - len(marker)))
        return marker

    def _end_thoughts(self, end: int) -> None:
        begin, self._thoughts_begin = self._thoughts_begin or 0, None
        self._num_past_reasoning_tokens += max(0, end - begin)

    def _read_last_calls(self, opener: str) -> Steps[bool]:
        """Whether nothing but whole calls follows within thoughts, up to the output's end; reads them.

        Thoughts may speak of a call: it is one if the turn ends with it. So it is told at the end.
        """
        calls, source = self._calls, self._source
        assert calls is not None
        if source.num_rewound > _MAX_REWOUND:
            source.position -= len(opener)
            return False
        source.hold(len(opener))
        told, num_calls, writer = list[OutputEvent](), self._num_calls, None
        call_ids = calls.call_ids
        try:
            while opener:
                is_unmarked = opener in self._lexicon.named_openers
                source.position -= len(opener) if is_unmarked else 0
                yield from calls.open_section("" if is_unmarked else opener, is_unmarked)
                has_next = True
                while has_next:
                    writer = self._make_writer(num_calls, told)
                    if not (yield from calls.read_call(writer, is_unmarked)):
                        raise Unreadable
                    num_calls += 1
                    has_next = yield from calls.has_next()
                openers = (*self._lexicon.call_openers, *self._lexicon.named_openers)
                opener = yield from source.accept_any(openers)
            if not (yield from source.comes_end()):
                raise Unreadable
        except Unreadable:
            if writer is None or not (writer.is_started and source.is_cut_off):
                source.release(goes_back=True)
                calls.call_ids = call_ids
                return False
            source.skip_rest()
        source.release(goes_back=False)
        self._events += told
        self._num_calls = num_calls
        return True

    def _read_unmarked(self, beginning: str) -> Steps[None]:
        """Read calls without their marker if there are any where their beginning was read; else that."""
        source, num_before, space = self._source, self._num_calls, self._source.dropped_space
        source.position -= len(beginning)
        yield from self._read_calls("", is_unmarked=True)
        if self._num_calls == num_before:
            self._emit_text(space + beginning)
            source.position += len(beginning)

    def _read_calls(self, opener: str, is_unmarked: bool = False) -> Steps[None]:
        """Read calls whose first marker was read; without `opener`, calls if there are any."""
        calls, source = self._calls, self._source
        assert calls is not None
        space = source.dropped_space if opener else ""
        if source.num_rewound > _MAX_REWOUND:
            if opener:
                self._emit_text(space + opener)
            return
        source.keep(len(opener))
        num_before = self._num_calls
        while True:
            writer = self._make_writer()
            try:
                if self._num_calls == num_before:
                    yield from calls.open_section(opener, is_unmarked)
                is_valid = yield from calls.read_call(writer, is_unmarked)
            except Unreadable:
                is_call = bool(opener) or self._num_calls > num_before
                yield from self._give_up(writer, is_call, space)
                return
            self.num_errors += not is_valid
            self._num_calls += 1
            if not (yield from calls.has_next()):
                break
            space = ""
        yield from source.skip_space()

    def _read_messages(self) -> Steps[None]:
        """Read a turn of messages; the prompt holds what starts the first."""
        source, channels = self._source, self._lexicon.channels
        assert channels is not None
        while (yield from source.has_more()):
            source.keep()
            try:
                header = yield from self._read_header(channels)
            except Unreadable:
                source.rewind()
                self._emit_text(source.text[source.position :])
                source.position = len(source.text)
                continue
            name = channels.find_recipient(header, self._tools)
            if name is not None and self._calls:
                yield from self._read_message_call(self._calls, name)
            source.forget()
            if channels.is_thinking(header):
                begin = self._marked.num_tokens_before(source.place - 1) + 1
                self._thoughts_begin = min(begin, self._marked.num_tokens)  # the header may be cut
                marker = yield from self._read_thoughts(channels.message_stop)
            else:
                marker = yield from source.read_until(channels.message_stop, self._emit_text, "")
            if marker in channels.openers:
                source.position -= len(marker)

    def _read_header(self, channels: ChannelLexicon) -> Steps[str]:
        """Read what comes before a message's text; '' if that begins at once.

        Raises Unreadable for a header that is far too long. One that the end of the output cuts is no text.
        """
        source, pieces = self._source, list[str]()
        yield from source.skip_space()
        for start in channels.header_starts:
            if (yield from source.accept(start)):
                marker = yield from source.read_until(channels.header_stop, pieces.append, "")
                header = "".join([start, *pieces])
                if not marker and len(header) > _MAX_HEADER:
                    raise Unreadable
                return header
        return ""

    def _read_message_call(self, calls: CallReader, name: str) -> Steps[None]:
        """Read a call that is a message, up to the message's end."""
        writer = self._make_writer()
        try:
            yield from self._source.skip_space()
            if not writer.is_offered(name):
                raise Unreadable
            yield from calls.read_arguments(writer, name)
        except Unreadable:
            yield from self._give_up(writer, True, "")
            return
        self.num_errors += not writer.end()
        self._num_calls += 1
        yield from self._source.skip_space()

    def _make_writer(self, index: int | None = None, events: list[OutputEvent] | None = None) -> CallWriter:
        restore, emit = self._lexicon.marks.restore, (self._events if events is None else events).append
        index = self._num_calls if index is None else index
        return CallWriter(index, self._tools, restore, emit, self._has_short_ids)

    def _give_up(self, writer: CallWriter, is_call: bool, space: str) -> Steps[None]:
        """End a call that goes wrong. What was not told of it is content, `space` before it included."""
        source, stop = self._source, self._lexicon.call_stop
        if writer.is_started:
            self._num_calls += 1
            source.forget()
        else:
            source.rewind()
            if not is_call:
                return
            self._emit_text(space + source.text[source.position : source.position + 1])
            source.position += 1
        self.num_errors += not source.is_cut_off
        if writer.is_started and source.is_cut_off:
            source.skip_rest()  # a piece of the call
        marker = yield from source.read_until(stop, self._emit_text, "")
        if marker in self._lexicon.call_openers:
            source.position -= len(marker)
        elif not writer.is_started:
            self._emit_text(marker)

    def _emit_text(self, text: str) -> None:
        self._has_content = self._has_content or not text.isspace()
        self._events.append(TextDelta(self._lexicon.marks.restore(text)))

    def _emit_reasoning(self, text: str) -> None:
        self._events.append(ReasoningDelta(self._lexicon.marks.restore(text)))


def _merge(events: Sequence[OutputEvent]) -> Iterator[OutputEvent]:
    """The same events with neighbouring deltas joined."""
    for (kind, index), group in groupby(events, _stream_of):
        if kind is TextDelta or kind is ReasoningDelta:
            yield kind("".join(event.text for event in group if isinstance(event, kind)))
        elif kind is ToolCallDelta:
            pieces = [event.arguments for event in group if isinstance(event, ToolCallDelta)]
            yield ToolCallDelta(index, "".join(pieces))
        else:
            yield from group


def _stream_of(event: OutputEvent) -> tuple[type[OutputEvent], int]:
    return type(event), 0 if isinstance(event, TextDelta | ReasoningDelta) else event.index
