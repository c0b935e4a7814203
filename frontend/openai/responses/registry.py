"""ResponseRegistry: the responses of one HTTP process, and the way to those that others of its group have."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import NamedTuple

import msgspec

from ....ipc.errors import shorten
from ..bodies.responses import ResponsesResponse
from ..errors import ApiError
from ..limits import Limits
from .peers import UNKNOWN, Ask, Found, Peers, PeerSockets
from .store import Record, ResponseStore

_EXPIRY_PERIOD_S = 60.0  # at least, between looks for what has been kept long enough: nobody sees it before
_ID = re.compile("resp-[0-9a-f]{32}([0-9a-f]{2})")  # the last two digits: the process that has it


AbortRequests = Callable[[list[str]], Awaitable[None]]


class _Running(NamedTuple):
    owner: str
    response: ResponsesResponse
    abort: AbortRequests


class ResponseRegistry:
    """`store`: what is kept here."""

    def __init__(self, limits: Limits) -> None:
        self.store = ResponseStore(limits.max_stored_bytes, limits.max_stored_s, time.monotonic)
        self.has_store = limits.max_stored_bytes > 0
        self._keep_s = limits.max_stored_s
        self._running: dict[str, _Running] = {}  # by id
        self._peers: Peers | None = None
        self._expiry: asyncio.TimerHandle | None = None

    async def join(self, sockets: PeerSockets) -> None:
        """Be one of a group from now on."""
        self._peers = Peers(sockets, self._answer)
        await self._peers.start()

    def close(self) -> None:
        """Answer nobody any more. Idempotent."""
        if self._peers is not None:
            self._peers.close()
        if self._expiry is not None:
            self._expiry.cancel()

    def make_id(self) -> str:
        """The id of a response that is going to run here."""
        place = 0 if self._peers is None else self._peers.place
        return f"resp-{uuid.uuid4().hex}{place:02x}"

    def begin(self, response: ResponsesResponse, record: Record, abort: AbortRequests) -> None:
        """A response runs from now on; it is to be kept if it says so. `abort`: of the engine that has it."""
        self._running[response.id] = _Running(record.owner, response, abort)
        if response.store:
            self.store.add(response.id, record)
            if self._expiry is None:
                self._drop_expired()

    def finish(self, response: ResponsesResponse) -> None:
        """It has all it is going to have."""
        if response.store:
            output = msgspec.json.encode(response.output)
            self.store.finish(response.id, msgspec.json.encode(response), output, len(response.output))

    def end(self, response_id: str, owner: str) -> None:
        """It does not run any more; what has not finished, because its client has left, is forgotten."""
        del self._running[response_id]
        if (record := self.store.find(response_id, owner)) is not None and not record.response:
            self.store.remove(response_id, owner)

    async def ask(self, ask: Ask) -> Found:
        """What its process says of a response; ApiError 404 when this owner has none, 503 without answer."""
        place = _find_place(ask.response_id)
        if place is None:
            found = UNKNOWN
        elif self._peers is None or place == self._peers.place:
            found = await self._answer(ask)
        else:
            found = await self._peers.ask(place, ask)
        if found.status == "unknown":
            raise self._make_unknown(ask.response_id)
        return found

    def _make_unknown(self, response_id: str) -> ApiError:
        why = "this server keeps none (max_stored_bytes=0)"
        if self.has_store:
            why = (
                f"a response is kept for {self._keep_s:g} s (max_stored_s) in the memory of the process that "
                "made it, as far as there is room (max_stored_bytes), unless store=false"
            )
        message = f"response {shorten(response_id)} not found: {why}"
        return ApiError(HTTPStatus.NOT_FOUND, message, code="response_not_found")

    async def _answer(self, ask: Ask) -> Found:
        """What is known here."""
        response_id, owner = ask.response_id, ask.owner
        if ask.what == "cancel":
            return await self._cancel(response_id, owner)
        record = self.store.find(response_id, owner)
        if record is None:
            return UNKNOWN
        if ask.what == "remove" and record.response:
            self.store.remove(response_id, owner)
        if not record.response:
            return self._describe_running(response_id)
        return Found("ended", record.response, record.items, record.num_items)

    async def _cancel(self, response_id: str, owner: str) -> Found:
        running = self._running.get(response_id)
        if running is None or running.owner != owner:
            return await self._answer(Ask("find", response_id, owner))
        await running.abort([response_id])
        cancelled = msgspec.structs.replace(running.response, status="cancelled")
        return Found("running", msgspec.json.encode(cancelled))

    def _describe_running(self, response_id: str) -> Found:
        return Found("running", msgspec.json.encode(self._running[response_id].response))

    def _drop_expired(self) -> None:
        """Now, and when the next is due."""
        due = self.store.drop_expired()
        self._expiry = None
        if due is not None:
            delay_s = max(_EXPIRY_PERIOD_S, due - time.monotonic())
            self._expiry = asyncio.get_running_loop().call_later(delay_s, self._drop_expired)


def _find_place(response_id: str) -> int | None:
    found = _ID.fullmatch(response_id)
    return None if found is None else int(found[1], 16)
