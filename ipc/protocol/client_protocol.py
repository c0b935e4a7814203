"""ClientProtocol: a client's side of messages.py as a state machine without socket, clock or process.

Its driver says what happens (connection made and lost, frames, the engine's end, the time) and sends what is
in `outbox`. The blocking and the asyncio client, the simulator's and a daemon's supervisor drive it.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections import deque
from collections.abc import Sequence

import msgspec

from ..errors import (
    FINAL_KINDS,
    ConfigError,
    EngineDeadError,
    ProtocolError,
    raise_remote,
)
from ..params.param_fields import make_plain
from ..processes.due import find_earliest
from ..processes.liveness import ChildWatch
from ..processes.restarts import RestartBudget
from .codec import PING, make_client_codec
from .fair_share import MAX_CLIENT_WEIGHT
from .messages import (
    PROTOCOL_VERSION,
    AbortRequests,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDead,
    EngineFacts,
    EngineRoster,
    Goodbye,
    Hello,
    LeaseCheck,
    ProtocolNotice,
    Refusal,
    StartupProgress,
    UtilityCall,
    UtilityMethod,
    UtilityResult,
    Welcome,
    WorkerStatus,
    make_aborts,
)
from .request_ledger import RequestLedger
from .request_price import frame_requests
from .send_window import SendWindow

# Notices that come sooner are of what was sent before the last Hello.
REGREET_AFTER_S = 1.0
RECONNECT_TIMEOUT_S = 600.0  # how long a client waits for a daemon that is there and has no engine
LOST_CALL = "the engine was lost before it answered"
GOODBYE = make_client_codec().encode(Goodbye())

_log = logging.getLogger(__name__)


class ClientProtocol:
    """One client of one engine after another, the next in the place of one that was lost.

    It is in one of three states:

        state    until                                                   then
        closed   the Welcome to its last Hello                           open
                 the driver says that no engine is left, a final         ended
                 Refusal, or RECONNECT_TIMEOUT_S after it was open
        open     the connection is lost, or a Hello is said again        closed
                 last words of the engine (EngineDead, Refusal)          ended
        ended    for ever: `end_reason` says why, and `check` raises it

    While it is closed, what arrives is of the past, but for a Refusal. One that is not final (the start
    failed, another may go well) leaves it closed if there is somebody to make that start: an engine that
    `is_supervised`, or that was ready once. The same is true of last words where it `has_others`. When it is
    open again, every unfinished request is added again with the tokens that it has, and goes on.
    `now` is a monotonic clock's time in every call.
    """

    def __init__(
        self,
        client_kind: str = "private",
        weight: float = 1.0,
        *,
        is_supervised: bool = False,
        window: SendWindow | None = None,
    ) -> None:
        """`is_supervised`: a daemon's supervisor starts the engine, as often as it takes, and ends if there
        will be none. `window`: for the driver to keep to. Raises ConfigError for a weight that the engine
        would not take.
        """
        self.window = window
        self._kind, self._weight = make_plain(client_kind), make_plain(weight)
        if not 0.0 < self._weight <= MAX_CLIENT_WEIGHT:
            allowed = f"a number above 0 and up to {MAX_CLIENT_WEIGHT:g}"
            raise ConfigError("client_weight", self._weight, allowed)
        self.ledger = RequestLedger()
        self.outbox: deque[tuple[bytes]] = deque()  # to be sent in order; the driver removes what was sent
        self.answers: dict[int, UtilityResult] = {}  # to utility calls, until `end_call`
        self.facts: EngineFacts | None = None  # from the first Welcome on
        self.engine_index = 0  # which one of the roster it is, as it said last
        self.roster: EngineRoster | None = None  # as the engine said last; None: there is no other engine
        self.phase: str | None = None  # of the engine's start, as it said last
        self.is_open = False
        self.has_worker = True  # while it is open: else the engine starts another
        self.has_others = False  # engines: calls of this one end with it, with the error LOST_CALL
        self.refusal: Refusal | None = None  # why the engine, or the one before it, did not start or ended
        self.end_reason: str | None = None  # why there is no engine any more
        self.restart_at: float | None = None  # when the driver is to start another engine
        self._is_supervised = is_supervised
        self._codec = make_client_codec()
        self._number = 0  # of the last Hello; its Welcome repeats it
        self._epoch = ""
        self._lost_at: float | None = None
        self._greeted_at = 0.0  # when it has said Hello last
        self._garbled = RestartBudget()
        self._watch: ChildWatch | None = None
        self._calls: dict[int, UtilityCall] = {}  # without an answer
        self._call_ids = itertools.count(1)

    @property
    def is_idle(self) -> bool:
        """Whether the engine owes nothing, so that its silence need not be noticed."""
        return self.is_open and not self.ledger and not self._calls and self.restart_at is None

    @property
    def next_deadline(self) -> float | None:
        """When `time_passed` or `engine_started` is due; None if never."""
        if self.end_reason is not None:
            return None
        give_up_at = None if self._lost_at is None else self._lost_at + RECONNECT_TIMEOUT_S
        check_at = None if self._watch is None else self._watch.next_check_at
        return find_earliest(self.restart_at, give_up_at, check_at)

    def check(self) -> None:
        """Raise if there is no engine any more: EngineDeadError, or if it was never ready what its refusal
        stands for, EngineStartError without one.
        """
        if self.end_reason is None:
            return
        if self.facts is not None:
            raise EngineDeadError(self.end_reason)
        raise_remote("" if self.refusal is None else self.refusal.kind, self.end_reason)

    def end(self, reason: str) -> None:
        """Nothing more is expected, sent or started; the first reason counts: the engine's own, if it has
        told one since it was open.
        """
        self.end_reason = self.end_reason or (reason if self.refusal is None else self.refusal.reason)
        self.restart_at = None
        self.outbox.clear()

    # What happens to the engine and the connection.

    def engine_started(self, watch: ChildWatch | None) -> None:
        """There is an engine, or another one. `watch`: of one that this client may kill."""
        self._watch = watch
        self.restart_at = None

    def engine_ended(self, how: str, restart_after_s: float | None, now: float) -> None:
        """It has ended. `restart_after_s` from now the driver may start another; None: there will be none."""
        if restart_after_s is None:
            self.end(how)
        else:
            self.restart_at = now + restart_after_s

    def connection_made(self, now: float) -> None:
        """The engine can be reached, maybe another one: say Hello. No earlier Welcome counts from now on.

        On a connection that stands it begins anew: the engine drops what it has of this client.
        """
        self._close(now)
        self._greeted_at = now
        if self._watch is not None:
            self._watch.note_listening()
            if self.facts is not None:
                self._watch.start(now)
        hello = Hello(PROTOCOL_VERSION, self._kind, os.getpid(), self._weight, self._number)
        self.outbox.append(self._codec.encode(hello))

    def connection_lost(self, now: float) -> None:
        """The engine may be restarting, or it has dropped this client."""
        if self.is_open and self.has_others:
            self.answers |= {call_id: UtilityResult(call_id, LOST_CALL) for call_id in self._calls}
            self._calls.clear()
        self._close(now)

    def _close(self, now: float) -> None:
        self.outbox.clear()
        if self.window is not None:
            self.window.reset()
        self._number += 1  # a Welcome that is on its way is of the past, also before the next Hello
        if self._watch is not None:
            self._watch.stop()
        if self.is_open:
            self.is_open = False
            self._lost_at = now

    def time_passed(self, now: float) -> None:
        """Do what the engine's silence calls for, and give up an engine that was away for too long."""
        if self._watch is not None and self._watch.look(now):
            self.outbox.append(PING)
        if self._lost_at is not None and now - self._lost_at >= RECONNECT_TIMEOUT_S:
            self.end(f"no connection to the engine for {RECONNECT_TIMEOUT_S:g} s")

    # What the client wants.

    def add_requests(self, requests: Sequence[EngineCoreRequest], now: float) -> None:
        """Hand requests to the engine, now or when there is one again; none of them if one cannot be sent."""
        if self.is_open:
            self.outbox.extend([self._codec.encode(message) for message in frame_requests(requests)])
        for request in requests:
            self.ledger.add(request, now, self.is_open)

    def abort_requests(self, request_ids: list[str]) -> None:
        """Ask the engine to end requests; each live one still gets its final output."""
        self.ledger.abort(request_ids)
        for message in make_aborts(request_ids):
            self.send(message)

    def abort_named(self, names: Sequence[str], tenant: str) -> None:
        """Ask the engine to end requests of any client; while it is away this does nothing."""
        self.send(AbortRequests([], list(names), tenant))

    def start_call(self, method: UtilityMethod) -> int:
        """Call the engine, or the one in its place unless it `has_others`. The id of the answer."""
        call = UtilityCall(next(self._call_ids), method)
        self._calls[call.call_id] = call
        self.send(call)
        return call.call_id

    def end_call(self, call_id: int) -> None:
        """Forget a call and its answer."""
        self._calls.pop(call_id, None)
        self.answers.pop(call_id, None)

    def send(self, message: msgspec.Struct) -> None:
        """Say it. Nothing is sent while it is not open: with a Welcome all is said that is to be known."""
        if self.is_open:
            self.outbox.append(self._codec.encode(message))

    # What the engine says.

    def note_heard(self, now: float) -> None:
        """The engine has said something, which `frames_received` may be told of later."""
        if self._watch is not None:
            self._watch.note_heard(now)

    def frames_received(self, frames: list[bytes], now: float) -> list[EngineCoreOutput]:
        """Take one message in; the outputs in it that are to be delivered.

        Raises what a refused start stands for, EngineDeadError when an engine that was ready says that it
        ends, ProtocolError for what makes no sense.
        """
        try:
            message = self._codec.decode(frames)
        except ProtocolError as error:
            self._note_garbled(error, now)
            return []
        if not self.is_open:
            self._take_while_closed(message, now)
            return []
        match message:
            case EngineCoreOutputs(outputs=outputs, epoch=epoch):
                # What another life of the engine has sent was asked for again by `_open`.
                return self.ledger.take(outputs) if epoch == self._epoch else []
            case UtilityResult(call_id=call_id):
                if self._calls.pop(call_id, None) is not None:
                    self.answers[call_id] = message
                elif self.window is not None:
                    self.window.note_answer(call_id)
            case EngineDead(reason=reason) | Refusal(reason=reason):
                self._take_last_words(Refusal(reason), now, is_final=True)
            case ProtocolNotice():
                return self._take_notice(message, now)
            case EngineRoster():
                self.roster = message
            case WorkerStatus(has_worker=has_worker):
                self.has_worker = has_worker
            case _:
                pass
        return []

    def _note_garbled(self, error: ProtocolError, now: float) -> None:
        """What the frame held is lost: begin anew. Raises EngineDeadError when that happens too often."""
        if self.facts is None:
            raise error
        if not self.is_open:  # left over from before
            return
        if self._garbled.note_loss(now) is None:
            self.end(f"frames between this process and its engine do not decode: {error}")
            self.check()
        _log.error("from the engine: %s; asking for it again", error)
        self.connection_made(now)  # Hello again, on the connection that there is

    def _take_notice(self, notice: ProtocolNotice, now: float) -> list[EngineCoreOutput]:
        """The request that the engine could not read fails. Else what it lacks is not known: begin anew."""
        if notice.request_id is None:
            self._note_garbled(ProtocolError(notice.reason), now)
            return []
        _log.error("request %s fails, for the engine cannot read it: %s", notice.request_id, notice.reason)
        return self.ledger.fail(notice.request_id, notice.reason)

    def _take_while_closed(self, message: msgspec.Struct, now: float) -> None:
        match message:
            case Welcome():
                if message.number == self._number and self.end_reason is None:
                    self._open(message, now)
            case StartupProgress():
                self.phase = message.phase
                self.engine_index, self.roster = message.engine_index, message.roster
            case LeaseCheck() | UtilityResult() | WorkerStatus():
                pass  # another client left just now, or a PING was answered: both are sent before a Welcome
            case Refusal(number=number):
                if number in (None, self._number):
                    self._take_last_words(message, now, is_final=message.kind in FINAL_KINDS)
            case EngineDead(reason=reason) if not self.has_others:
                self._take_last_words(Refusal(reason), now, is_final=True)
            case EngineRoster():
                self.roster = message
            case ProtocolNotice() if self.facts is not None or self.phase is not None:
                # The engine, which has heard of this client, does not know it. One that was starved of a
                # processor has lost its connection, and a driver without a monitor does not see that.
                if now - self._greeted_at >= REGREET_AFTER_S:
                    _log.warning("the engine has forgotten this process (%s): saying Hello again", self._kind)
                    self.connection_made(now)
            case _ if self.facts is None:
                raise ProtocolError(f"{type(message).__name__} came before Welcome")
            case _:
                pass  # left over from before the connection was lost

    def _open(self, welcome: Welcome, now: float) -> None:
        """Bring an engine that knows nothing of this client up to date."""
        is_other_engine = self.facts is not None and welcome.epoch != self._epoch
        self.facts, self._epoch = welcome.facts, welcome.epoch
        self.engine_index, self.roster = welcome.engine_index, welcome.roster
        self.is_open, self.has_worker = True, welcome.has_worker
        self._lost_at = None
        self.refusal = None
        if self._watch is not None:
            self._watch.start(now)
        for message in [*self.ledger.resume(now, is_other_engine), *self._calls.values()]:
            self.send(message)

    def _take_last_words(self, refusal: Refusal, now: float, *, is_final: bool) -> None:
        """The engine ends or will not have this client, and says why: this counts more than how its process
        has ended. Another may come in its place, unless it `is_final`: the roster says so if it `has_others`.
        """
        self.refusal = refusal
        if self.is_open and self.has_others:
            self.connection_lost(now)
        elif is_final:
            self.end_reason = refusal.reason
        self.outbox.clear()
        self.outbox.append(GOODBYE)  # so that it need not wait
        self.check()
        if self.facts is None and not self._is_supervised:
            raise_remote(refusal.kind, refusal.reason)
