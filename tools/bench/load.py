"""Sends requests to a server on a schedule and records when each piece of each answer came.

Open loop: the schedule is made beforehand and nothing holds it back, so a server that falls behind gets
its queue, and a request's times count from when it was due. Closed loop: as many users as
`max_concurrency`, each sending its next request when it has its answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from .http_stream import AnswerError, AnswerReader, EventParser, HttpClient

_LAG_PROBE_S = 0.05
_MAX_REASON_LEN = 300


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None

    @property
    def has_text(self) -> bool:
        delta = self.delta
        return bool(self.text if delta is None else delta.content or delta.reasoning_content)


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Error(msgspec.Struct):
    message: str = ""


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


class _Vectors(msgspec.Struct):
    data: list[msgspec.Raw]
    usage: _Usage


_CHUNK_DECODER = msgspec.json.Decoder(_Chunk)


@dataclass(slots=True)
class RequestRecord:
    """One request's times (time.perf_counter) and counts. `error` is None when it was answered whole."""

    due_at: float
    sent_at: float = 0.0
    first_at: float | None = None  # its first text; None: the answer had none
    ended_at: float = 0.0
    text_times: list[float] = field(default_factory=list[float])  # of each piece of text
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    has_usage: bool = False  # the server counted the tokens; else pieces of text are counted
    error: str | None = None


class RecordReader(AnswerReader):
    """Reads one answer into a record."""

    def __init__(self, record: RequestRecord) -> None:
        super().__init__()
        self._record = record

    def finish(self, status: int) -> None:
        """The answer is complete. Raises AnswerError when it says that the request was not answered."""
        if status != 200:
            raise AnswerError(f"HTTP {status}: {_read_refusal(self.body)}")

    def _take_usage(self, usage: _Usage) -> None:
        self._record.has_usage = True
        self._record.num_prompt_tokens = usage.prompt_tokens
        self._record.num_output_tokens = usage.completion_tokens


class StreamReader(RecordReader):
    """Reads a stream of completion chunks."""

    def __init__(self, record: RequestRecord) -> None:
        super().__init__(record)
        self._events = EventParser()
        self._is_done = False

    def take_body(self, status: int, data: bytes, now: float) -> None:
        """Of AnswerReader: a refusal is kept, a stream taken apart."""
        if status != 200:
            super().take_body(status, data, now)
            return
        for event in self._events.feed(data):
            if event == b"[DONE]":
                self._is_done = True
            else:
                self._take_chunk(event, now)

    def finish(self, status: int) -> None:
        """Of RecordReader."""
        super().finish(status)
        if not self._is_done:
            raise AnswerError("the stream ended without [DONE]")
        if not self._record.has_usage:
            self._record.num_output_tokens = len(self._record.text_times)

    def _take_chunk(self, event: bytes, now: float) -> None:
        try:
            chunk = _CHUNK_DECODER.decode(event)
        except msgspec.DecodeError as error:
            raise AnswerError(f"an event that is no completion chunk: {error}") from None
        if chunk.error is not None:
            raise AnswerError(f"error in the stream: {chunk.error.message[:_MAX_REASON_LEN]}")
        if chunk.usage is not None:
            self._take_usage(chunk.usage)
        for choice in chunk.choices:
            if choice.has_text:
                self._record.first_at = self._record.first_at or now
                self._record.text_times.append(now)


class VectorReader(RecordReader):
    """Reads one whole answer of /v1/embeddings."""

    def finish(self, status: int) -> None:
        """Of RecordReader."""
        super().finish(status)
        try:
            answer = msgspec.json.decode(self.body, type=_Vectors)
        except msgspec.DecodeError as error:
            raise AnswerError(f"an answer without vectors: {error}") from None
        if not answer.data:
            raise AnswerError("an answer without vectors")
        self._take_usage(answer.usage)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How requests are sent. request_rate inf: all that may be sent are sent at once."""

    request_rate: float  # requests/s, Poisson
    max_concurrency: int | None
    timeout_s: float  # of one request, from when it is sent
    seed: int
    reader: type[RecordReader] = StreamReader

    @property
    def is_closed_loop(self) -> bool:
        """Whether the next request waits for an answer and not for its time."""
        return self.max_concurrency is not None and math.isinf(self.request_rate)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What a run recorded, and what the client itself spent on it."""

    records: list[RequestRecord]
    started_at: float
    duration_s: float  # from the start to the end of the last answer
    cpu_s: float  # the client's, over duration_s
    lags_s: list[float]  # how late the client's own timers were, several a second


async def run_load(
    client: HttpClient,
    requests: Sequence[bytes],
    options: LoadOptions,
    on_answer: Callable[[], object] = lambda: None,
) -> LoadResult:
    """Send everything and wait for every answer; each one is waited for `timeout_s` at most."""
    limit = options.max_concurrency
    slots = contextlib.nullcontext() if limit is None else asyncio.Semaphore(limit)
    cpu_before, start, lags_s = _measure_cpu_s(), time.perf_counter(), list[float]()
    records = [RequestRecord(start + offset_s) for offset_s in draw_offsets(len(requests), options)]

    async def send(request: bytes, record: RequestRecord) -> None:
        async with slots:
            record.sent_at = time.perf_counter()
            if options.is_closed_loop:
                record.due_at = record.sent_at
            record.error = await send_request(client, request, record, options)
            on_answer()

    probe = asyncio.create_task(_probe_lag(lags_s))
    try:
        async with asyncio.TaskGroup() as group:
            for request, record in zip(requests, records, strict=True):
                if (delay_s := record.due_at - time.perf_counter()) > 0:
                    await asyncio.sleep(delay_s)
                group.create_task(send(request, record))
    finally:
        probe.cancel()
    end = max((record.ended_at for record in records), default=start)
    return LoadResult(records, start, end - start, _measure_cpu_s() - cpu_before, lags_s)


async def send_request(
    client: HttpClient, request: bytes, record: RequestRecord, options: LoadOptions
) -> str | None:
    """Fill the record from one request's answer; returns why it failed, or None."""
    reader = options.reader(record)
    try:
        async with asyncio.timeout(options.timeout_s):
            status = await client.exchange(request, reader)
        reader.finish(status)
    except TimeoutError:
        return f"no complete answer within {options.timeout_s:g} s"
    except AnswerError as error:
        return str(error)
    except OSError as error:
        return f"{type(error).__name__}: {error.strerror or error}"
    finally:
        record.ended_at = time.perf_counter()
    return None


def draw_offsets(num_requests: int, options: LoadOptions) -> list[float]:
    """When each request is due, in seconds from the start: a Poisson process that begins at 0."""
    if math.isinf(options.request_rate):
        return [0.0] * num_requests
    rng = random.Random(f"arrivals/{options.seed}")
    offsets = [0.0]
    while len(offsets) < num_requests:
        offsets.append(offsets[-1] + rng.expovariate(options.request_rate))
    return offsets[:num_requests]


async def _probe_lag(lags_s: list[float]) -> None:
    while True:
        before = time.perf_counter()
        await asyncio.sleep(_LAG_PROBE_S)
        lags_s.append(max(0.0, time.perf_counter() - before - _LAG_PROBE_S))


def _read_refusal(body: bytes) -> str:
    """What an error answer says: OpenAI's error.message, else its text."""
    try:
        error = msgspec.json.decode(body, type=_Chunk).error
    except msgspec.DecodeError:
        error = None
    text = error.message if error is not None else body.decode(errors="replace")
    return " ".join(text.split())[:_MAX_REASON_LEN]


def _measure_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
