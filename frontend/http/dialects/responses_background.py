"""Answer: a response while it comes into being, with its events. BackgroundAnswer: nobody waits for it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from ...formats.answer_reader import AnswerReader
from ...outputs import RequestOutput
from ..bodies.schema import TokenLogprob
from ..errors import as_api_error
from ..jobs.event_log import EventLog
from ..jobs.registry import EndBackground, ResponseRegistry
from ..jobs.store import Record
from ..serving import Serving
from ..stream import Json, encode_named_event
from .conversation import ParsedOutputs
from .logprobs import as_json, make_beside, make_chat_logprobs
from .responses_events import ResponseEncoder
from .usage import UsageCounter

_COUNT_BYTES = 4096  # by which a log grows until it is counted again


async def encode_events(events: AsyncGenerator[list[Json], None]) -> AsyncGenerator[bytes, None]:
    """As a stream has them."""
    async with aclosing(events):
        async for some in events:
            if some:
                yield _join(some)


def _join(events: list[Json]) -> bytes:
    return b"".join(map(encode_named_event, events))


def encode_stream_failure(error: Exception) -> bytes:
    """The end of a stream that cannot go on, while its response does, or is lost with its process."""
    api_error = as_api_error(error)
    error_fields = {"code": api_error.code or "server_error", "message": str(api_error)}
    return encode_named_event({"type": "error", **error_fields, "param": None, "sequence_number": 0})


class Answer:
    """One response while it comes into being."""

    def __init__(
        self,
        serving: Serving,
        encoder: ResponseEncoder,
        reader: AnswerReader,
        record: Record,
        num_top: int | None,
        decode: Callable[[list[int]], Awaitable[str]] | None = None,
    ) -> None:
        """num_top: likeliest tokens beside each one of the text, None for no logprobs. decode: to text, of an
        answer that also tells the tokens of its prompt and its own, as vLLM does.
        """
        self.response = encoder.response
        self.reader = reader
        self._registry = serving.responses
        self._abort = serving.llm.abort
        self.encoder = encoder
        self._owner = record.owner
        self._counter = UsageCounter()
        self._record: Record | None = record
        self._num_top, self._tokenizer = num_top, serving.llm.tokenizer
        self._decode, self._token_ids = decode, list[int]()

    def begin(self, log: EventLog | None = None, give_up: EndBackground | None = None) -> None:
        """It is known, and kept, from now on; `run` does this itself. give_up: see ResponseRegistry.begin."""
        record, self._record = self._record, None
        assert record is not None
        record.log = log
        # From here on the record is counted, and may be dropped.
        self._registry.begin(self.response, record, self._abort, give_up)

    async def run(self, parsed: ParsedOutputs) -> AsyncGenerator[list[Json], None]:
        """The events, those of an output at a time. The response is complete, and kept, when they end."""
        async with aclosing(parsed):
            is_begun = self._record is None  # then its end is also somebody else's
            begun = self.encoder.start if is_begun else self.encoder.begin
            if not is_begun:
                self.begin()
            try:
                async for output, events in parsed:
                    if begun is not None:
                        yield begun()
                        begun = None
                    api_events = self.encoder.take(events[0], await self._make_logprobs(output))
                    self._counter.add(output)
                    if self._decode is not None:
                        self._token_ids += output.outputs[0].token_ids
                    if output.finished:
                        if self._decode is not None:
                            await self._tell_tokens(output.prompt_token_ids, self._decode)
                        api_events += self.finish(output.outputs[0].finish_reason)
                    yield api_events
            finally:
                if not is_begun:
                    self.end()

    def encode_failure(self, error: Exception) -> bytes:
        """The event that ends a stream in which something went wrong."""
        api_error = as_api_error(error)
        return _join(self.encoder.fail(api_error.code or "server_error", str(api_error)))

    def end(self) -> None:
        """It runs no more. Idempotent."""
        self._registry.end(self.response["id"], self._owner)

    def finish(self, finish_reason: str | None) -> list[Json]:
        """It is complete, or cut off, with what has come; returns its last events."""
        usage = self._counter.usage()
        if self.reader.has_errors(0):
            self.response["tool_parse_error"] = True
        api_events = self.encoder.end(
            finish_reason,
            {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": self.reader.num_reasoning_tokens or 0},
                "total_tokens": usage["total_tokens"],
            },
        )
        self._registry.finish(self.response)
        return api_events

    async def _tell_tokens(self, prompt: list[int], decode: Callable[[list[int]], Awaitable[str]]) -> None:
        for name, ids in (("input_messages", prompt), ("output_messages", self._token_ids)):
            raw = {"message": await decode(ids), "tokens": ids, "type": "raw_message_tokens"}
            self.response[name] = [as_json(raw)]

    async def _make_logprobs(self, output: RequestOutput) -> list[TokenLogprob]:
        """As JSON; not in the event loop where that takes long."""
        positions = output.outputs[0].logprobs
        if self._num_top is None or positions is None:
            return []
        make = functools.partial(make_chat_logprobs, positions, self._num_top, self._tokenizer)
        return await make_beside(output, lambda: list(map(as_json, make().content)))


class BackgroundAnswer:
    """An Answer that runs on whoever has left. `begin`, then a task that does `run`, and `end` after it."""

    def __init__(self, registry: ResponseRegistry, answer: Answer, log: EventLog | None) -> None:
        """log: for the events, of one that may be followed."""
        self.log = log
        self.task: asyncio.Task[None] | None = None
        self._registry = registry
        self._answer = answer
        self._counted_bytes = 0  # of the log
        self._is_cancelled = False

    def begin(self) -> None:
        """It can be asked for from now on. ApiError 413 or 429 when there is no room to keep it."""
        response = self._answer.response
        self._note(self._answer.encoder.queue())
        self._answer.begin(self.log, self._give_up)
        if response["id"] not in self._registry.store:
            self._answer.end()
            raise self._registry.make_no_room(response["id"])

    async def run(self, parsed: ParsedOutputs) -> None:
        """Until it has ended, however it does; what fails is part of the response."""
        response, encoder = self._answer.response, self._answer.encoder
        try:
            async with aclosing(self._answer.run(parsed)) as batches:
                async for events in batches:
                    self._note(events)
        except asyncio.CancelledError:
            if self._is_cancelled:
                self._note(self._answer.finish("abort"))
                return
            self._note(encoder.fail("response_dropped", "there was no room to keep it (max_stored_bytes)"))
        except Exception as error:
            api_error = as_api_error(error)
            events = encoder.fail(api_error.code or "server_error", str(api_error))
            self._registry.finish(response)
            self._note(events)

    def end(self, _: object = None) -> None:
        """It runs no more, and its log has all events. Idempotent."""
        self._answer.end()
        if self.log is not None:
            self.log.close()

    def _give_up(self, *, is_cancelled: bool = False) -> None:
        self._is_cancelled = is_cancelled
        if self.task is not None:
            self.task.cancel()

    def _note(self, events: list[Json]) -> None:
        if self.log is None:
            return
        self.log.add(events)
        if self.log.num_bytes - self._counted_bytes >= _COUNT_BYTES:
            self._counted_bytes = self.log.num_bytes
            self._registry.store.grow(self._answer.response["id"])
