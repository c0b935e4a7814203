"""CallHandler: from a call's first byte to its status: who calls, room for the message, errors as statuses.

A message is asked for only after the key was found good: until then gRPC's core holds what fits its window
(64 KiB a call). Every method is registered as one of streams, because gRPC takes the message of any other
before it calls its handler. How many are received at once is bounded by ReceiveGate, fairly.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import unquote

import grpc
import grpc.aio
import msgspec

from ...ipc.protocol.rights import Reach, Standing, check_route, find_reach
from ..http.caller import Caller, TenantUsage, name_address
from ..http.connections.auth import STRANGER, ApiKeys
from ..http.errors import ApiError, as_api_error, overloaded
from ..http.limits import Limits
from ..http.observe.access_log import CURRENT, KEY_LENGTH, AccessLog, AccessRecord
from ..http.options import ServerOptions
from ..http.text_process.lane import TurnQueue

_USUAL_MESSAGE_BYTES = 4 << 20  # gRPC's own default; the dearest message of that size takes 60 ms to parse
_MAX_KEYLESS_CALLS = 64  # answered at once; who does not read its answer stays for write_timeout_s
_MAX_DETAILS_BYTES = 2000  # of an error's text: a client takes headers of 8 KiB, and these are escaped
_STATUSES = {
    HTTPStatus.BAD_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    HTTPStatus.UNAUTHORIZED: grpc.StatusCode.UNAUTHENTICATED,
    HTTPStatus.FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    HTTPStatus.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    HTTPStatus.REQUEST_TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    HTTPStatus.TOO_MANY_REQUESTS: grpc.StatusCode.RESOURCE_EXHAUSTED,
    HTTPStatus.SERVICE_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
}

Context = grpc.aio.ServicerContext[bytes, bytes]
_Turn = tuple[str, asyncio.Future[None]]  # of a tenant
_NO_BOUND = 2**31  # who waits holds no message, and the number of calls is bounded elsewhere


class ReceiveGate:
    """`num_places` that tenants share as ipc/protocol/fair_share.py says; who finds none waits for a turn."""

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._taken = TenantUsage()
        self._waiting: TurnQueue[_Turn] = TurnQueue(_NO_BOUND, _NO_BOUND, _NO_BOUND)

    def has_place(self, tenant: str) -> bool:
        """Whether `place` would not wait."""
        return self._taken.has_room(tenant, 1, self._num_places)

    @asynccontextmanager
    async def place(self, tenant: str) -> AsyncGenerator[None, None]:
        """Hold a place for the block."""
        if self.has_place(tenant):
            self._taken.enter(tenant, 1)
        else:
            await self._wait(tenant)
        try:
            yield
        finally:
            self._leave(tenant)

    async def _wait(self, tenant: str) -> None:
        turn: _Turn = tenant, asyncio.get_running_loop().create_future()
        self._waiting.put(tenant, turn, 0)
        try:
            await turn[1]
        except asyncio.CancelledError:
            self._waiting.remove(tenant, turn)
            if not turn[1].cancelled():  # it was given a place meanwhile
                self._leave(tenant)
            raise

    def _leave(self, tenant: str) -> None:
        self._taken.leave(tenant, 1)
        if self._taken.amount < self._num_places and (turn := self._waiting.take()) is not None:
            next_tenant, is_next = turn
            self._taken.enter(next_tenant, 1)
            is_next.set_result(None)


def find_max_message_bytes(limits: Limits) -> int:
    """The largest message that is received."""
    return min(limits.max_body_bytes, _USUAL_MESSAGE_BYTES)


class Call:
    """A call whose message has come: who calls, and the way to answer.

    A caller's deadline, as its cancelling, cancels the task that runs the call: gRPC's core keeps the time.
    """

    def __init__(self, context: Context, caller: Caller, write_timeout_s: float) -> None:
        self.caller = caller
        self._context = context
        self._write_timeout_s = write_timeout_s

    async def write(self, message: bytes) -> None:
        """Send an answer, or a part; waits while the reader does not read, then raises ApiError."""
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await self._context.write(message)
        except TimeoutError:
            text = f"answer: expected to be read within {self._write_timeout_s:g} s (write_timeout_s)"
            raise ApiError(HTTPStatus.REQUEST_TIMEOUT, text, code="slow_reader") from None


class Method(msgspec.Struct, frozen=True):
    """What a call does with its message."""

    run: Callable[[Call, bytes], Awaitable[None]]


class CallHandler:
    """Runs the calls of a process; those under way are in `tasks`, for which the server waits at its end."""

    def __init__(
        self, options: ServerOptions, tasks: set[asyncio.Task[None]], access_log: AccessLog | None
    ) -> None:
        self._access_log = access_log
        self._limits = options.limits
        self._keys = ApiKeys(options.api_key_hashes, options.server_id)
        self._tasks = tasks
        num_places = options.limits.max_total_body_bytes // find_max_message_bytes(options.limits)
        self._gate = ReceiveGate(max(1, num_places))
        self._keyless_gate = ReceiveGate(_MAX_KEYLESS_CALLS)

    def wrap(self, method: Method, path: str) -> grpc.RpcMethodHandler[bytes, bytes]:
        """The handler that gRPC calls. The access log has a line for each, with HTTP's status of its end."""

        check_route(path)

        async def handle(_messages: AsyncIterator[bytes], context: Context) -> None:
            record = AccessRecord("POST", path, find_address(context.peer()))
            CURRENT.set(record)  # a call has a task, and with it a context, of its own
            error = None
            try:
                error = await self._run(method, path, context, record)
            finally:
                self._note(record, error)
            if error is not None:
                await _refuse(context, error)

        return grpc.stream_stream_rpc_method_handler(handle)

    def _note(self, record: AccessRecord, error: ApiError | None) -> None:
        if self._access_log is None:
            return
        if error is not None:
            record.refuse(error.status, error.cause)
        self._access_log.note(record)

    async def _run(
        self, method: Method, path: str, context: Context, record: AccessRecord
    ) -> ApiError | None:
        """The call; returns what it is to be refused with. The record has a status if it was answered."""
        task: Any = asyncio.current_task()
        self._tasks.add(task)
        try:
            caller = self._identify(context)
            if caller is None:
                await self._run_keyless(method, path, context)
            else:
                record.key = caller.key_hash[:KEY_LENGTH]
                call = Call(context, caller, self._limits.write_timeout_s)
                await method.run(call, await self._receive(context, caller))
        except grpc.aio.BaseError:  # the caller is gone
            return None
        except Exception as error:
            return as_api_error(error)
        finally:
            self._tasks.discard(task)
        record.status = HTTPStatus.OK
        return None

    def _identify(self, context: Context) -> Caller | None:
        """Who calls: by the API key, None without a right one; by the address where there are no keys."""
        caller = self._keys.identify(_find_key(context))
        return None if caller is None else caller.at(find_host(context.peer()))

    async def _run_keyless(self, method: Method, path: str, context: Context) -> None:
        """The call of a stranger, whose message is not read."""
        if find_reach(path, Standing.STRANGER) is Reach.NONE:
            raise ApiError(
                HTTPStatus.UNAUTHORIZED,
                "authorization: expected an API key of this server: 'Bearer KEY', or as x-api-key or api-key",
                param="authorization",
                code="invalid_api_key",
            )
        caller = STRANGER.at(find_host(context.peer()))
        if not self._keyless_gate.has_place(caller.address):
            raise overloaded(f"{_MAX_KEYLESS_CALLS} calls without an API key are under way")
        async with self._keyless_gate.place(caller.address):
            await method.run(Call(context, caller, self._limits.write_timeout_s), b"")

    async def _receive(self, context: Context, caller: Caller) -> bytes:
        """The call's one message. Raises ApiError when it does not come in time, or not at all."""
        timeout_s = self._limits.max_body_s
        try:
            async with asyncio.timeout(timeout_s), self._gate.place(caller.tenant):
                message = cast(object, await context.read())
        except TimeoutError:
            text = f"message: expected within {timeout_s:g} s (max_body_s)"
            raise ApiError(HTTPStatus.REQUEST_TIMEOUT, text, code="request_timeout") from None
        if not isinstance(message, bytes):  # the caller has none
            raise ApiError(HTTPStatus.BAD_REQUEST, "message: required", code="missing_message")
        return message


def find_host(peer: str) -> str:
    """The host of gRPC's 'ipv4:1.2.3.4:56' or 'ipv6:[1::2]:56'."""
    return unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]")


def find_address(peer: str) -> str:
    """The client that such a peer stands for."""
    return name_address(find_host(peer))


def _find_key(context: Context) -> list[tuple[bytes, bytes]]:
    """The metadata as HTTP's headers: a key comes in the same ones."""
    metadata = context.invocation_metadata() or ()
    return [(str(name).encode(), value.encode()) for name, value in metadata if isinstance(value, str)]


async def _refuse(context: Context, error: ApiError) -> None:
    """End the call with the error's status and text; its field and code as trailing metadata."""
    named = {"error-field": error.param, "error-code": error.code}
    if error.headers.get("x-should-retry") == "false":
        named["grpc-retry-pushback-ms"] = "-1"  # gRPC's own word for: do not try again
    metadata = tuple(
        (name, value.encode("ascii", "backslashreplace").decode()) for name, value in named.items() if value
    )
    details = str(error).encode()[:_MAX_DETAILS_BYTES].decode(errors="ignore")
    status = _STATUSES.get(error.status, grpc.StatusCode.INTERNAL)
    await context.abort(status, details, metadata)
