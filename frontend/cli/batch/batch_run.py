"""Runs the lines of a batch through the HTTP server's own app, in this process and without a socket."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message

from ....ipc.decoding import decode_json
from ....ipc.errors import EngineDeadError, describe_refusal, did_you_mean
from ...async_llm import AsyncLLM
from ...http.app import create_app
from ...http.connections.auth import ApiKeyMiddleware
from ...http.engines.served_models import ServedModels
from ...http.options import ServerOptions
from ...http.stream import cancel_and_wait
from . import batch_files as files

_TEXT_URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_SCORE_URLS = ("/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank")
_VECTOR_URLS = ("/v1/embeddings", "/classify", "/pooling", *_SCORE_URLS)
URLS = (*_TEXT_URLS, *_VECTOR_URLS)
_OVERLOADED = 429
_RETRY_S = 1.0  # between tries of a line that the engine has no room for, as a daemon under load may say
_MAX_TRIES = 600


class _Line(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Body(msgspec.Struct):
    stream: Any = None
    background: Any = None


class LineError(Exception):
    """A line that cannot be sent; `custom_id` as far as it could be read."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        self.code = code
        self.custom_id = custom_id
        super().__init__(message)


@dataclass(slots=True)
class BatchCounts:
    """Results of this run by how they ended."""

    num_answered: int = 0  # with status 200
    num_refused: int = 0  # malformed lines, and statuses 4xx
    num_failed: int = 0  # statuses 5xx

    def add(self, result: files.BatchResult) -> None:
        """Count a result; a line that could not be sent counts as a 400."""
        status = 400 if result.response is None else result.response.status_code
        if status < 400:
            self.num_answered += 1
        elif status < 500:
            self.num_refused += 1
        else:
            self.num_failed += 1

    @property
    def num_results(self) -> int:
        """All of them."""
        return self.num_answered + self.num_refused + self.num_failed


@dataclass(slots=True, eq=False)
class BatchRun:
    """One run over the lines that are due, at most `max_concurrency` at a time (None: by the engine)."""

    llm: AsyncLLM
    lines: Iterator[files.InputLine]
    progress: files.Progress
    results: files.ResultFile
    max_concurrency: int | None
    on_result: Callable[[files.BatchResult], None] | None = None
    counts: BatchCounts = field(default_factory=BatchCounts, init=False)
    _stop: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    async def run(self, on_phase: Callable[[str], None] | None = None) -> bool:
        """Run until every line has a result (True) or SIGINT or SIGTERM came (False).

        What was under way when a signal came is aborted and has no result. Raises EngineStartError, and
        EngineDeadError when the engine ends; lines without a result then stay due.
        """
        with self._signals_noted():
            try:
                working = asyncio.ensure_future(self._work(on_phase))
                stopping = asyncio.ensure_future(self._stop.wait())
                await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
                is_whole = working.done()
                await cancel_and_wait(working, stopping)
                if is_whole:
                    working.result()
                return is_whole
            finally:
                self.llm.shutdown()

    async def _work(self, on_phase: Callable[[str], None] | None) -> None:
        await self.llm.start(on_phase)
        num_workers = self.max_concurrency or 2 * self.llm.facts.max_num_seqs * self.llm.num_engines
        # The server's own bound on waiting sequences is for many clients; here `num_workers` is the bound.
        models = ServedModels.of_one(self.llm, ServerOptions(max_waiting=2**31 - 1))
        app = ApiKeyMiddleware(create_app(models), ())
        models.only.open()
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(num_workers, self.progress.num_lines - self.progress.num_done)):
                    group.create_task(self._answer_lines(app))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            models.close()

    async def _answer_lines(self, app: ASGIApp) -> None:
        """One worker: the next line that is due, as long as there is one."""
        for line in self.lines:
            if self.progress.is_due(line):
                self._keep(await self._answer(app, line))
            await asyncio.sleep(0)  # of a million lines none may need to wait: signals and answers do

    def _keep(self, result: files.BatchResult) -> None:
        self.results.append(result)
        self.progress.add(result.id)
        self.counts.add(result)
        if self.on_result is not None:
            self.on_result(result)

    async def _answer(self, app: ASGIApp, line: files.InputLine) -> files.BatchResult:
        """A line's result. Raises EngineDeadError instead of one that says no more than that."""
        try:
            request = parse_line(line)
        except LineError as error:
            return files.BatchResult(
                id=line.result_id, custom_id=error.custom_id, error=files.BatchError(error.code, str(error))
            )
        status, answer = await self._ask(app, request)
        request_id = _read_text(answer, "id") or line.result_id
        response = files.BatchResponse(status, request_id, msgspec.Raw(answer))
        return files.BatchResult(id=line.result_id, custom_id=request.custom_id, response=response)

    async def _ask(self, app: ASGIApp, request: _Line) -> tuple[int, bytes]:
        """(status, body) of the answer; where there is no room, of the last of many tries."""
        for _ in range(_MAX_TRIES):
            answer = await call_app(app, request.url, bytes(request.body))
            if self.llm.dead_error is not None:
                raise EngineDeadError(str(self.llm.dead_error))
            if answer[0] != _OVERLOADED:
                return answer
            await asyncio.sleep(_RETRY_S)
        return await call_app(app, request.url, bytes(request.body))

    @contextlib.contextmanager
    def _signals_noted(self) -> Generator[None]:
        """Inside, SIGINT and SIGTERM end the run between two writes."""
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM)
        for number in numbers:
            loop.add_signal_handler(number, self._stop.set)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)


def parse_line(line: files.InputLine) -> _Line:
    """A line as a request. Raises LineError."""
    if line.is_cut:
        raise LineError("line_too_long", f"line {line.number}: expected at most {files.MAX_LINE_BYTES} bytes")
    try:
        request = decode_json(line.text, _Line)
        body = decode_json(request.body, _Body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        code = "invalid_request" if isinstance(error, msgspec.ValidationError) else "invalid_json"
        raise LineError(code, f"line {line.number}: {error}", _read_text(line.text, "custom_id")) from None
    if request.method != "POST":
        message = f"line {line.number}: {describe_refusal('method', request.method, 'POST')}"
        raise LineError("invalid_method", message, request.custom_id)
    if request.url not in URLS:
        allowed = f"one of {', '.join(URLS)}{did_you_mean(request.url, URLS)}"
        message = f"line {line.number}: {describe_refusal('url', request.url, allowed)}"
        raise LineError("invalid_url", message, request.custom_id)
    for name in ("stream", "background"):  # whose answers come later
        if getattr(body, name):
            message = f"line {line.number}: {describe_refusal(name, True, 'false or absent in a batch')}"
            raise LineError("invalid_request", message, request.custom_id)
    return request


async def call_app(app: ASGIApp, path: str, body: bytes) -> tuple[int, bytes]:
    """(status, body) of a POST of JSON to an ASGI app; cancelling it is the client's disconnect."""
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": None,
    }
    unread = [body]
    never = asyncio.Event()
    status = 500
    answer: list[bytes] = []

    async def receive() -> Message:
        if not unread:
            await never.wait()
        return {"type": "http.request", "body": unread.pop(), "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message["type"] == "http.response.body":
            answer.append(message.get("body", b""))

    await app(scope, receive, send)
    return status, b"".join(answer)


def _read_text(data: bytes, name: str) -> str | None:
    """A field of a JSON object; None where it is no text, or cannot be read."""
    try:
        fields = decode_json(data, dict[str, msgspec.Raw])
        return decode_json(fields[name], str)
    except (KeyError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
