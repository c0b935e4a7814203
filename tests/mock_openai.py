"""A server that speaks OpenAI's streaming over HTTP/1.1 with known delays, in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

DEADLINE_S = 10.0


@dataclass
class Behaviour:
    """How every request is answered, unless its prompt holds a word of `failures`."""

    first_delay_s: float = 0.0
    gap_s: float = 0.0
    num_tokens: int = 4  # at most; max_tokens counts too
    has_usage: bool = True
    num_slots: int = 1_000_000  # requests answered at a time; others wait
    closes_after_answer: bool = False  # without saying so beforehand
    failures: dict[str, str] = field(default_factory=dict)  # word -> refuse | cut | undone | error | silent


class MockOpenAI:
    """Runs between `with` and its end; `asked` holds (path, headers, body) of every POST."""

    def __init__(self, behaviour: Behaviour | None = None) -> None:
        self.behaviour = behaviour or Behaviour()
        self.asked: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.num_connections = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._port: Future[int] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        self.port = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(DEADLINE_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(DEADLINE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE_S)
        self._loop.close()

    async def _start(self) -> int:
        self._slots = asyncio.Semaphore(self.behaviour.num_slots)
        self._stopping = asyncio.Event()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=4096)
        return self._server.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        self._server.close()
        self._stopping.set()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*self._tasks)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            while await self._answer_one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client or the test has finished
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            self._writers.discard(writer)
            self._tasks.discard(task)

    async def _answer_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.rstrip().split("\r\n")
        method, path, _ = first.split(" ")
        headers = {name.lower(): value.strip() for name, value in (line.split(":", 1) for line in lines)}
        if method == "GET":
            self._write_json(writer, 200, {"object": "list", "data": [{"id": "mock"}, {"id": "other"}]})
            return True
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        self.asked.append((path, headers, body))
        async with self._slots:
            stays = await self._answer(writer, body, is_chat=path.endswith("/chat/completions"))
        return stays and not self.behaviour.closes_after_answer

    async def _answer(self, writer: asyncio.StreamWriter, body: dict[str, Any], *, is_chat: bool) -> bool:
        """True if the connection can go on."""
        behaviour = self.behaviour
        text = body["messages"][-1]["content"] if is_chat else body["prompt"]
        failure = next((how for word, how in behaviour.failures.items() if word in text), None)
        if failure == "refuse":
            self._write_json(writer, 429, {"error": {"message": "too many requests", "code": 429}})
            return True
        if failure == "silent":
            await self._stopping.wait()
            return False
        await asyncio.sleep(behaviour.first_delay_s)
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        num_tokens = min(behaviour.num_tokens, body["max_tokens"])
        if is_chat:
            self._write_event(
                writer, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
            )
        for number in range(num_tokens):
            if number:
                await asyncio.sleep(behaviour.gap_s)
            piece = f"t{number} "
            choice = {"index": 0, "delta": {"content": piece}} if is_chat else {"index": 0, "text": piece}
            self._write_event(writer, {"choices": [choice]})
            self._write_raw(writer, b": ping\n\n")
            if failure == "cut":
                return False
            if failure in ("error", "undone"):
                if failure == "error":
                    self._write_event(writer, {"error": {"message": "the engine failed"}})
                writer.write(b"0\r\n\r\n")
                return True
        if behaviour.has_usage:
            usage = {"prompt_tokens": len(text.split()), "completion_tokens": num_tokens}
            self._write_event(writer, {"choices": [], "usage": usage})
        self._write_raw(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        return True

    def _write_event(self, writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
        self._write_raw(writer, b"data: " + json.dumps(event).encode() + b"\n\n")

    def _write_raw(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def _write_json(self, writer: asyncio.StreamWriter, status: int, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
