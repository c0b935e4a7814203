"""Sends requests to a server on a schedule and records when each piece of each answer came.

Open loop: the schedule is made beforehand and nothing holds it back, so a server that falls behind gets
its queue, and a request's times count from when it was due. Closed loop: as many users as
`max_concurrency`, each sending its next request when it has its answer.
"""

from __future__ import annotations

import asyncio
import math
import random
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from .http_stream import AnswerError, AnswerReader, EventParser, HttpClient

_LAG_PROBE_S = 0.05
_MAX_ERROR_BYTES = 64 * 1024
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
_VECTORS_DECODER = msgspec.json.Decoder(_Vectors)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How requests are sent. request_rate inf: all that may be sent are sent at once."""

    request_rate: float  # requests/s, Poisson
    max_concurrency: int | None
    timeout_s: float  # of one request, from when it is sent
    seed: int
    wants_vectors: bool = False  # the answers are whole ones of /v1/embeddings

    @property
    def is_closed_loop(self) -> bool:
        """Whether the next request waits for an answer and not for its time."""
        return self.max_concurrency is not None and math.isinf(self.request_rate)


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


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What a run recorded, and what the client itself spent on it."""

    records: list[RequestRecord]
    started_at: float
    duration_s: float  # from the start to the end of the last answer
    cpu_s: float  # the client's, over duration_s
    lags_s: list[float]  # how late the client's own timers were, several a second


class StreamReader(AnswerReader):
    """Reads one streamed answer into a record."""

    def __init__(self, record: RequestRecord) -> None:
        self._record = record
        self._events = EventParser()
        self._is_done = False
        self._refusal = b""

    def take_body(self, status: int, data: bytes, now: float) -> None:
        if status != 200:
            self._refusal += data[: _MAX_ERROR_BYTES - len(self._refusal)]
            return
        for event in self._events.feed(data):
            if event == b"[DONE]":
                self._is_done = True
            else:
                self._take_chunk(event, now)

    def finish(self, status: int) -> None:
        """The answer is complete. Raises AnswerError when it says that the request was not answered."""
        if status != 200:
            raise AnswerError(f"HTTP {status}: {_read_refusal(self._refusal)}")
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
        record = self._record
        if chunk.usage is not None:
            record.has_usage = True
            record.num_prompt_tokens = chunk.usage.prompt_tokens
            record.num_output_tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            if choice.has_text:
                record.first_at = record.first_at or now
                record.text_times.append(now)


class VectorReader(AnswerReader):
    """Reads one whole answer of /v1/embeddings into a record."""

    def __init__(self, record: RequestRecord) -> None:
        self._record = record
        self._body = bytearray()

    def take_body(self, status: int, data: bytes, now: float) -> None:  # noqa: ARG002
        self._body += data

    def finish(self, status: int) -> None:
        """The answer is complete. Raises AnswerError when it has no vector."""
        if status != 200:
            raise AnswerError(f"HTTP {status}: {_read_refusal(bytes(self._body[:_MAX_ERROR_BYTES]))}")
        try:
            answer = _VECTORS_DECODER.decode(self._body)
        except msgspec.DecodeError as error:
            raise AnswerError(f"an answer without vectors: {error}") from None
        if not answer.data:
            raise AnswerError("an answer without vectors")
        self._record.has_usage = True
        self._record.num_prompt_tokens = answer.usage.prompt_tokens


class LoadRun:
    """One run of prepared requests against one server."""

    def __init__(
        self,
        client: HttpClient,
        requests: Sequence[bytes],
        options: LoadOptions,
        on_answer: Callable[[RequestRecord], None] | None = None,
    ) -> None:
        self._client = client
        self._requests = requests
        self._options = options
        self._on_answer = on_answer
        self._records: list[RequestRecord] = []
        self._lags_s: list[float] = []

    async def run(self) -> LoadResult:
        """Send everything and wait for every answer; each one is waited for `timeout_s` at most."""
        cpu_before = _measure_cpu_s()
        start = time.perf_counter()
        probe = asyncio.create_task(self._probe_lag())
        try:
            await (self._run_closed() if self._options.is_closed_loop else self._run_open(start))
        finally:
            probe.cancel()
        cpu_s = _measure_cpu_s() - cpu_before
        end = max((record.ended_at for record in self._records), default=start)
        return LoadResult(self._records, start, end - start, cpu_s, self._lags_s)

    async def _run_closed(self) -> None:
        queue = iter(self._requests)
        num_users = min(self._options.max_concurrency or 1, len(self._requests))
        async with asyncio.TaskGroup() as group:
            for _ in range(num_users):
                group.create_task(self._ask_one_by_one(queue))

    async def _ask_one_by_one(self, queue: Iterator[bytes]) -> None:
        for request in queue:
            await self._send(request, self._add_record(time.perf_counter()))

    async def _run_open(self, start: float) -> None:
        limit = self._options.max_concurrency
        slots = None if limit is None else asyncio.Semaphore(limit)
        async with asyncio.TaskGroup() as group:
            for request, offset_s in zip(
                self._requests, draw_offsets(len(self._requests), self._options), strict=True
            ):
                delay_s = start + offset_s - time.perf_counter()
                if delay_s > 0:
                    await asyncio.sleep(delay_s)
                group.create_task(self._send_in_slot(request, self._add_record(start + offset_s), slots))

    async def _send_in_slot(
        self, request: bytes, record: RequestRecord, slots: asyncio.Semaphore | None
    ) -> None:
        if slots is None:
            await self._send(request, record)
            return
        async with slots:
            await self._send(request, record)

    async def _send(self, request: bytes, record: RequestRecord) -> None:
        record.sent_at = time.perf_counter()
        options = self._options
        record.error = await send_request(
            self._client, request, record, options.timeout_s, wants_vectors=options.wants_vectors
        )
        record.ended_at = time.perf_counter() if record.error is not None else record.ended_at
        if self._on_answer is not None:
            self._on_answer(record)

    def _add_record(self, due_at: float) -> RequestRecord:
        record = RequestRecord(due_at)
        self._records.append(record)
        return record

    async def _probe_lag(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(_LAG_PROBE_S)
            self._lags_s.append(max(0.0, time.perf_counter() - before - _LAG_PROBE_S))


async def send_request(
    client: HttpClient,
    request: bytes,
    record: RequestRecord,
    timeout_s: float,
    *,
    wants_vectors: bool = False,
) -> str | None:
    """Fill the record from one request's answer; returns why it failed, or None."""
    reader = VectorReader(record) if wants_vectors else StreamReader(record)
    try:
        async with asyncio.timeout(timeout_s):
            status = await client.exchange(request, reader)
        record.ended_at = time.perf_counter()
        reader.finish(status)
    except TimeoutError:
        return f"no complete answer within {timeout_s:g} s"
    except AnswerError as error:
        return str(error)
    except OSError as error:
        return f"{type(error).__name__}: {error.strerror or error}"
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
