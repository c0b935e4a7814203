"""Streams, of server-sent events or of lines of JSON, and work that ends when its client leaves.

One write path: `_Writer`. While nothing flows it sends comments.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, NamedTuple, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .errors import MESSAGES_ID_HEADER, as_api_error, encode_error, make_error_response
from .limits import Limits

DONE = b"data: [DONE]\n\n"
GONE_EXTENSION = "quire.tell_when_gone"  # of scope["extensions"]: has the client's leaving told, or not
REQUEST_ID_HEADER = b"x-request-id"  # OpenAI's clients show it; Anthropic's show the other one
ID_HEADERS = (REQUEST_ID_HEADER, MESSAGES_ID_HEADER.encode())
_HEAD_WAIT_S = 1.0
_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy shall not collect chunks
]


class StreamForm(NamedTuple):
    """How a stream is written. ping: sent while nothing flows; recovering: so while its engine restarts."""

    media_type: bytes
    ping: bytes
    recovering: bytes


SSE = StreamForm(b"text/event-stream; charset=utf-8", b": ping\n\n", b": recovering\n\n")
NDJSON = StreamForm(b"application/x-ndjson", b" ", b" ")  # before a line: JSON's readers skip white space

T = TypeVar("T")
Json = dict[str, Any]  # an object of an answer; what it has is in tests/golden/dialects
_TellWhenGone = Callable[[Callable[[], None] | None], None]


class JsonResponse(Response):
    """An answer that is JSON already; its headers are not encoded one by one, as Starlette does (4 us)."""

    def __init__(self, body: bytes, request_id: str | None = None, status: int = 200) -> None:
        """request_id: what the headers call it."""
        self.body, self.status_code, self.background = body, status, None
        self.raw_headers = [(b"content-length", b"%d" % len(body)), (b"content-type", b"application/json")]
        if request_id is not None:
            name = request_id.encode("latin-1")
            self.raw_headers += [(header, name) for header in ID_HEADERS]


def respond(body: msgspec.Struct | Json, request_id: str | None = None, status: int = 200) -> Response:
    """An answer that is not streamed."""
    return JsonResponse(msgspec.json.encode(body), request_id, status)


def encode_event(body: Json | msgspec.Struct) -> bytes:
    """`data: {...}` and the empty line that ends it."""
    return b"data: %b\n\n" % msgspec.json.encode(body)


def encode_named_event(event: Json) -> bytes:
    """As `encode_event` with an `event:` line, which says its type."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event))


class ChunkTemplate:
    """Chunks of a stream in which one answer says one thing: a fixed beginning, what it says, a fixed end.

    head: any chunk of the stream, without choices. before, after: what stands around it in the choice.
    """

    def __init__(self, head: Json, before: bytes, after: bytes) -> None:
        # The encoded head ends in `"choices":[]}` or `"choices":[],"usage":null}`.
        beginning, end = msgspec.json.encode(head).split(b'"choices":[]')
        self._beginning = b'data: %b"choices":[{"index":%%d,%b' % (beginning.replace(b"%", b"%%"), before)
        self._end = b"%b}]%b\n\n" % (after, end)
        self._beginnings: dict[int, bytes] = {}  # by answer
        self._encode = msgspec.json.Encoder().encode

    def make(self, index: int, content: str | Json) -> bytes:
        """The event of an answer's chunk."""
        beginning = self._beginnings.get(index)
        if beginning is None:
            beginning = self._beginnings[index] = self._beginning % index
        return beginning + self._encode(content) + self._end


def echo_request_id(response: Response, name: str) -> None:
    """Have an answer's X-Request-Id say what its caller has called the request, in place of its own id."""
    if isinstance(response, EventStream):
        response.asked_as = name
    else:
        response.headers[REQUEST_ID_HEADER.decode()] = name


async def run_while_connected(scope: Scope, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; ClientDisconnect when the client leaves first, and then `work` is cancelled.

    It runs in the caller's task: to wait for a task of its own costs a request of one token 5 %. Nor does a
    task watch the client: the connection calls. A batch's requests have none.
    """
    task = asyncio.current_task()
    assert task is not None, "a coroutine runs in a task"
    has_begun = is_gone = False

    def leave() -> None:
        nonlocal is_gone
        is_gone = True
        if has_begun:
            task.cancel()

    tell_when_gone: _TellWhenGone = scope.get("extensions", {}).get(GONE_EXTENSION, _ignore)
    tell_when_gone(leave)
    if is_gone:
        work.close()
        raise ClientDisconnect
    has_begun = True
    try:
        return await work
    except asyncio.CancelledError:
        if is_gone and not task.uncancel():  # nobody else has cancelled it
            raise ClientDisconnect from None
        raise
    finally:
        tell_when_gone(None)


def _ignore(_on_gone: Callable[[], None] | None) -> None:
    pass


class EventStream(Response):
    """Sends what `events` yields, ready-made bytes of the `form`, until it ends or the client leaves.

    The status line waits for the first event, so that an error before it is answered as an error; an error
    after it becomes an event that OpenAI's clients raise. `encode_failure` makes another form of the latter.
    `is_recovering` chooses what is sent while nothing flows.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        limits: Limits,
        encode_failure: Callable[[Exception], bytes] | None = None,
        request_id: str | None = None,
        is_recovering: Callable[[], bool] = lambda: False,
        form: StreamForm = SSE,
    ) -> None:
        super().__init__()
        self._form = form
        self._is_recovering = is_recovering
        self._request_id = request_id
        self.asked_as: str | None = None  # what its caller calls it
        self._events = events
        self._limits = limits
        self._encode_failure = encode_failure or _encode_failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = self._request_id
        names = {} if name is None else dict.fromkeys(ID_HEADERS, name)
        if self.asked_as is not None:
            names[REQUEST_ID_HEADER] = self.asked_as
        named = [(header, value.encode("latin-1")) for header, value in names.items()]
        writer = _Writer(send, [(b"content-type", self._form.media_type), *_HEADERS, *named])
        pinging = asyncio.ensure_future(self._ping(writer))
        try:
            await run_while_connected(scope, self._pump(writer, scope["method"] == "HEAD"))
        except ClientDisconnect:
            pass
        except Exception as error:
            if writer.has_started:
                raise
            response = make_error_response(error, scope["path"])
            self.status_code = response.status_code
            if self.asked_as is not None:
                echo_request_id(response, self.asked_as)
            await response(scope, receive, send)
        finally:
            await cancel_and_wait(pinging)
            await self._events.aclose()

    async def _ping(self, writer: _Writer) -> None:
        """Something where nothing flows. A reader that does not read is the connection's to cut off."""
        interval_s = self._limits.ping_interval_s
        while True:
            quiet_s = time.monotonic() - writer.last_write
            if quiet_s >= interval_s and not writer.is_blocked:
                await writer.write(self._form.recovering if self._is_recovering() else self._form.ping)
                quiet_s = 0.0
            await asyncio.sleep(interval_s - quiet_s if quiet_s < interval_s else interval_s)

    async def _pump(self, writer: _Writer, is_head: bool) -> None:
        try:
            async with aclosing(self._events) as events:
                if is_head:  # its status is GET's, which waits for the first event
                    with contextlib.suppress(TimeoutError, StopAsyncIteration):
                        await asyncio.wait_for(anext(events), _HEAD_WAIT_S)
                else:
                    async for data in events:
                        await writer.write(data)
        except Exception as error:
            if not writer.has_started:
                raise
            await writer.write(self._encode_failure(error))
        await writer.write(b"", more=False)


class _Writer:
    """The only way to a client's socket. `last_write`: when the last write began."""

    __slots__ = ("_headers", "_send", "has_started", "is_blocked", "last_write")

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self._send = send
        self._headers = headers
        self.has_started = False
        self.is_blocked = False
        self.last_write = time.monotonic()

    async def write(self, data: bytes, more: bool = True) -> None:
        """Send bytes; waits while the connection's buffer is full."""
        self.last_write = time.monotonic()
        self.is_blocked = True
        if not self.has_started:
            self.has_started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
        self.is_blocked = False


def _encode_failure(error: Exception) -> bytes:
    return b"data: %b\n\n" % encode_error(as_api_error(error)) + DONE


async def cancel_and_wait(*tasks: asyncio.Future[Any]) -> None:
    """Cancel what still runs and wait for it, so that its generators have been closed."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
