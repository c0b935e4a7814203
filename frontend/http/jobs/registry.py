"""ResponseRegistry: the responses of one HTTP process, and the way to those that others of its group have."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from http import HTTPStatus
from typing import NamedTuple, Protocol

import msgspec

from ....ipc.errors import shorten
from ..errors import ApiError, FieldError, overloaded
from ..limits import Limits
from ..stream import Json
from .event_log import EventLog
from .peers import EVENTS, UNKNOWN, Peers, PeerSockets, ResponseQuery, ResponseReply
from .store import Record, ResponseStore

_CANCEL_S = 1.0  # in which a response that is cancelled ends: what it has is written down in a few ms
_EXPIRY_PERIOD_S = 60.0  # at least, between looks for what has been kept long enough: nobody sees it before
_ID = re.compile("resp-[0-9a-f]{32}([0-9a-f]{2})")  # the last two digits: the process that has it


AbortRequests = Callable[[list[str]], Awaitable[None]]


class EndBackground(Protocol):
    """Ends a response that runs in the background, in a moment."""

    def __call__(self, *, is_cancelled: bool = False) -> None:
        """is_cancelled: somebody wants that; otherwise it is kept no more, and nobody could ask for it."""
        ...


class _Running(NamedTuple):
    owner: str
    response: Json
    abort: AbortRequests
    give_up: EndBackground | None  # of one that runs in the background
    ended: asyncio.Event

    @property
    def has_ended(self) -> bool:
        """Its status is final."""
        return self.response["status"] not in ("queued", "in_progress")


class ResponseRegistry:
    """`store`: what is kept here."""

    def __init__(self, limits: Limits) -> None:
        self.store = ResponseStore(
            limits.max_stored_bytes, limits.max_stored_s, time.monotonic, self._give_up_dropped
        )
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

    def begin(
        self, response: Json, record: Record, abort: AbortRequests, give_up: EndBackground | None = None
    ) -> None:
        """A response runs from now on; it is to be kept if it says so. `abort`: of the engine that has it.

        give_up: of one that runs in the background.
        """
        self._running[response["id"]] = _Running(record.owner, response, abort, give_up, asyncio.Event())
        if give_up is not None:
            self.store.counts.begin_background()
        if response["store"]:
            self.store.add(response["id"], record)
            if self._expiry is None:
                self._drop_expired()

    def make_no_room(self, response_id: str) -> ApiError:
        """Why a response that has just begun is not kept."""
        message = (
            f"there is no room to keep {response_id}: responses have {self.store.num_bytes} of "
            f"{self.store.max_bytes} bytes (max_stored_bytes), and this caller's share of them is taken"
        )
        return overloaded(message)

    def finish(self, response: Json) -> None:
        """It has all it is going to have."""
        if response["store"]:
            output: list[Json] = response["output"]
            encode = msgspec.json.encode
            self.store.finish(response["id"], encode(response), encode(output), len(output))
        if (running := self._running.get(response["id"])) is not None:
            running.ended.set()

    def end(self, response_id: str, owner: str) -> None:
        """It does not run any more; what has not finished is forgotten: its client has left. Idempotent."""
        running = self._running.pop(response_id, None)
        if running is not None:
            running.ended.set()
            if running.give_up is not None:
                self.store.counts.end_background(running.response["status"])
        if (record := self.store.find(response_id, owner)) is not None and not record.response:
            self.store.remove(response_id, owner)

    async def ask(self, ask: ResponseQuery) -> ResponseReply:
        """What its process says of a response; ApiError 404 when this owner has none, 503 without answer."""
        answer, _ = await self._ask(ask)
        return answer

    async def follow(self, response_id: str, owner: str, after: int) -> AsyncGenerator[bytes, None]:
        """The events behind number `after` of one that runs, or has run, in the background; errors as `ask`.

        Raises FieldError if the response has no events.
        """
        _, events = await self._ask(ResponseQuery("follow", response_id, owner, after + 1))
        if events is None:
            raise FieldError("stream", True, "false: only events of a response with background=true are kept")
        return events

    async def _ask(self, ask: ResponseQuery) -> tuple[ResponseReply, AsyncGenerator[bytes, None] | None]:
        """The answer of the process that has the response, which may be this one, and events that follow."""
        named, peers = _ID.fullmatch(ask.response_id), self._peers
        place = int(named[1], 16) if named else 0
        if peers is None or named is None or place == peers.place:
            answer, log = await self._answer(ask)
            events = None if log is None else log.follow(ask.number)
        else:
            answer, events = await peers.ask(place, ask)
        if answer.status == "unknown":
            raise self._make_unknown(ask.response_id)
        return answer, events

    def _give_up_dropped(self, response_id: str) -> None:
        running = self._running.get(response_id)
        if running is not None and running.give_up is not None:
            running.give_up()

    def _make_unknown(self, response_id: str) -> ApiError:
        why = "this server keeps none (max_stored_bytes=0)"
        if self.has_store:
            why = (
                f"a response is kept for {self._keep_s:g} s (max_stored_s) in the memory of the process that "
                "made it, as long as that lives and as there is room (max_stored_bytes), unless store=false"
            )
        message = f"response {shorten(response_id)} not found: {why}"
        return ApiError(HTTPStatus.NOT_FOUND, message, code="response_not_found")

    async def _answer(self, ask: ResponseQuery) -> tuple[ResponseReply, EventLog | None]:
        """What is known here, and the events to follow."""
        response_id, owner = ask.response_id, ask.owner
        if ask.what == "cancel":
            return await self._cancel(response_id, owner), None
        record = self.store.find(response_id, owner)
        if record is None:
            return UNKNOWN, None
        if ask.what == "follow" and record.log is not None:
            return EVENTS, record.log
        if not record.response:
            return ResponseReply("running", msgspec.json.encode(self._running[response_id].response)), None
        if ask.what == "remove":
            self.store.remove(response_id, owner)
        return ResponseReply("ended", record.response, record.items, record.num_items), None

    async def _cancel(self, response_id: str, owner: str) -> ResponseReply:
        running = self._running.get(response_id)
        if running is None or running.owner != owner:
            record = self.store.find(response_id, owner)
            return UNKNOWN if record is None else ResponseReply("ended", record.response)
        if not running.has_ended:
            await running.abort([response_id])
            await _wait_for_end(running)
        if not running.has_ended and running.give_up is not None:  # the engine did not have it yet
            running.give_up(is_cancelled=True)
            await _wait_for_end(running)
        if running.has_ended:
            return ResponseReply("ended", msgspec.json.encode(running.response))
        # Its own stream is not read: it ends as it has been aborted when that is.
        return ResponseReply("running", msgspec.json.encode(running.response | {"status": "cancelled"}))

    def _drop_expired(self) -> None:
        """Now, and when the next is due."""
        due = self.store.drop_expired()
        self._expiry = None
        if due is not None:
            delay_s = max(_EXPIRY_PERIOD_S, due - time.monotonic())
            self._expiry = asyncio.get_running_loop().call_later(delay_s, self._drop_expired)


async def _wait_for_end(running: _Running) -> None:
    """Not for long."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(running.ended.wait(), _CANCEL_S)
