"""The chunks of a streamed chat."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from ...output_formats.answer_reader import AnswerReader
from ...output_formats.events import (
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from ...outputs import CompletionOutput, RequestOutput
from ..bodies.chat_answers import AnswerFunction, ChatCompletionChunk, ChunkChoice, Delta, DeltaToolCall
from ..bodies.schema import ChatCompletionRequest, ChoiceLogprobs
from ..endpoints.logprobs import make_chat_logprobs, make_prompt_logprobs
from ..endpoints.usage import UsageCounter, choose_usage
from ..stream import DONE, encode_event

_TEXT_BEGINS, _TEXT_ENDS = b'{"content":', b"}"


class ChunkMaker:
    """Chunks of one stream. A chunk that only brings text is a fixed prefix, the text and a fixed suffix."""

    def __init__(
        self,
        request: ChatCompletionRequest,
        request_id: str,
        model: str,
        echoed: str,
        reader: AnswerReader,
        forces_usage: bool = False,
    ) -> None:
        """`echoed`: what each answer begins with. `reader`: knows which calls could not be read."""
        self._echoed = echoed
        self._request = request
        self._reader = reader
        self._has_usage, self._always_has_usage = choose_usage(request.stream_options, forces_usage)
        self._says_more = self._always_has_usage or bool(request.return_token_ids)  # in each chunk
        self.has_logprobs = wants_logprobs(request)
        self.counter = UsageCounter() if self._has_usage else None
        self._head = ChatCompletionChunk(id=request_id, created=int(time.time()), model=model, choices=[])
        if self._has_usage:
            self._head.usage = None
        # The encoded head ends in `"choices":[]}` or `"choices":[],"usage":null}`.
        before, after = msgspec.json.encode(self._head).split(b'"choices":[]')
        self._prefix = (
            b'data: %b"choices":[{"index":%%d,"delta":' % before.replace(b"%", b"%%") + _TEXT_BEGINS
        )
        self._suffix = _TEXT_ENDS + b',"logprobs":null,"finish_reason":null}]%b\n\n' % after
        self._prefixes: dict[int, bytes] = {}
        self._has_calls: defaultdict[int, bool] = defaultdict(bool)  # by answer
        self._encode = msgspec.json.Encoder().encode

    def make_roles(self, n: int, output: RequestOutput) -> bytes:
        """The first chunk of each answer says whose it is; made once."""
        echoed, self._echoed = self._echoed, ""
        delta = Delta(role="assistant", content=echoed)
        chunk = self._chunk([ChunkChoice(index, delta) for index in range(n)])
        if output.prompt_logprobs is not None:
            chunk.prompt_logprobs = make_prompt_logprobs(output.prompt_logprobs)
        if self._request.return_token_ids:
            chunk.prompt_token_ids = output.prompt_token_ids
        return encode_event(chunk)

    def make(self, output: RequestOutput, events: Sequence[Sequence[OutputEvent]] | None) -> bytes:
        """A chunk for each answer that has something new. `events`: of each answer; None: all is text."""
        if events is None:
            parts = [self._make_one(one) for one in output.outputs]
        else:
            parts = [self._make_deltas(one, own) for one, own in zip(output.outputs, events, strict=True)]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def make_last(self) -> bytes:
        """Usage, if it was asked for, and the end."""
        if not self._has_usage or self.counter is None:
            return DONE
        chunk = msgspec.structs.replace(self._head, usage=self.counter.usage())
        return encode_event(chunk) + DONE

    def _make_one(self, output: CompletionOutput) -> bytes:
        logprobs = choose_logprobs(self._request, output) if output.logprobs is not None else None
        if output.finish_reason is None and logprobs is None and not self._says_more:
            if not output.text:
                return b""
            prefix = self._prefixes.get(output.index) or self._add_prefix(output.index)
            return prefix + self._encode(output.text) + self._suffix
        choice = ChunkChoice(
            output.index,
            Delta(content=output.text) if output.text else Delta(),
            logprobs,
            output.finish_reason,
        )
        if output.finish_reason is not None:
            choice.stop_reason = output.stop_reason
        if self._request.return_token_ids:
            choice.token_ids = output.token_ids
        return encode_event(self._chunk([choice]))

    def _make_plain(self, index: int, delta: Delta) -> bytes:
        """A chunk that says nothing but `delta`."""
        prefix = self._prefixes.get(index) or self._add_prefix(index)
        return prefix[: -len(_TEXT_BEGINS)] + self._encode(delta) + self._suffix[len(_TEXT_ENDS) :]

    def _add_prefix(self, index: int) -> bytes:
        prefix = self._prefixes[index] = self._prefix % index
        return prefix

    def _make_deltas(self, output: CompletionOutput, events: Sequence[OutputEvent]) -> bytes:
        """A chunk an event. The last one says what else there is of this output."""
        index, finish = output.index, output.finish_reason
        deltas = [delta for event in events if (delta := _make_delta(event)) is not None]
        if not self._has_calls[index] and has_whole_call(events):
            self._has_calls[index] = True
        logprobs = choose_logprobs(self._request, output) if output.logprobs is not None else None
        if finish is None and logprobs is None and not self._says_more:
            return b"".join([self._make_plain(index, delta) for delta in deltas])
        *earlier, last = deltas or [Delta()]
        choice = ChunkChoice(index, last, logprobs)
        if self._request.return_token_ids:
            choice.token_ids = output.token_ids
        if finish is not None:
            choice.finish_reason = choose_finish_reason(finish, self._has_calls[index])
            choice.stop_reason = output.stop_reason
            if self._reader.has_errors(index):
                choice.tool_parse_error = True
        choices = [*(ChunkChoice(index, delta) for delta in earlier), choice]
        return b"".join(encode_event(self._chunk([one])) for one in choices)

    def _chunk(self, choices: list[ChunkChoice]) -> ChatCompletionChunk:
        chunk = msgspec.structs.replace(self._head, choices=choices)
        if self._always_has_usage and self.counter is not None:
            chunk.usage = self.counter.usage()
        return chunk


def _make_delta(event: OutputEvent) -> Delta | None:
    match event:
        case TextDelta(text):
            return Delta(content=text)
        case ReasoningDelta(text):
            return Delta(reasoning_content=text, reasoning=text)
        case ToolCallStart(index, call_id, name):
            begun = AnswerFunction(name, "")
            return Delta(tool_calls=[DeltaToolCall(index=index, id=call_id, type="function", function=begun)])
        case ToolCallDelta(index, arguments):
            more = AnswerFunction(arguments=arguments)
            return Delta(tool_calls=[DeltaToolCall(index=index, function=more)])
        case ToolCallEnd():
            return None


def has_whole_call(events: Sequence[OutputEvent]) -> bool:
    """Whether a call ends in them; a stop string may have cut the only one off."""
    return any(isinstance(event, ToolCallEnd) for event in events)


def choose_finish_reason(reason: str | None, has_calls: bool) -> str | None:
    """A turn that ends by itself ends for its whole calls, if it has some, also for one that was named."""
    return "tool_calls" if has_calls and reason == "stop" else reason


def choose_logprobs(request: ChatCompletionRequest, output: CompletionOutput) -> ChoiceLogprobs | None:
    """Of every token of an output, markers and thoughts too, if they are to be shown."""
    if output.logprobs is None or not wants_logprobs(request):
        return None
    top = request.logprob_token_ids or request.top_logprobs or 0
    return make_chat_logprobs(output.logprobs, top, bool(request.return_tokens_as_token_ids))


def wants_logprobs(request: ChatCompletionRequest) -> bool:
    """Whether logprobs are to be shown."""
    return bool(request.logprobs or request.logprob_token_ids)
