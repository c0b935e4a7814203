"""ClientRegistry: a core's clients, their messages and their outboxes: the core's side of messages.py.

It knows no socket: its owner brings messages and a way to send. One thread calls it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from ...ipc.errors import DaemonError, ProtocolError, make_printable
from ...ipc.processes.due import find_earliest
from ...ipc.protocol.messages import (
    PROTOCOL_VERSION,
    AbortRequests,
    EngineCoreRequest,
    EngineCoreRequests,
    EngineFacts,
    EngineRoster,
    FrontendCounts,
    Goodbye,
    Hello,
    LeaseCheck,
    Refusal,
    StartupProgress,
    UtilityCall,
    UtilityMethod,
    UtilityResult,
    Welcome,
    WorkerStatus,
)
from ...ipc.protocol.rights import MESSAGES, UTILITIES, Reach, Standing
from ..engine.engine_core import EngineCore
from ..stats.engine_facts import call_utility
from ..stats.stats_collector import CoreProcessInfo
from .clients import Client, LeaseWatch
from .origin import Origin, is_remote, make_owner_test


@dataclass(slots=True)
class GroupRoster:
    """The engines beside this one, as the owner of the group has sent them.

    `index` is this engine's number. Only `owner` may send a roster: the identity of the supervisor's socket,
    which is random and known to the two processes alone; empty without a supervisor.
    """

    index: int = 0
    roster: EngineRoster | None = None  # None: there is no other engine
    owner: bytes = b""


_REST = 20  # times the cost of a round until the next: answers take at most 5 % of the core's time
MAX_WAITING_CALLS = 1024  # of a client and a method; further calls are not answered

WaitingCalls = dict[bytes, deque[int]]  # client -> its call ids


class UtilityCalls:
    """Utility calls that wait, by method and client. `clock` is monotonic.

    An answer walks all live requests: 0.5 ms for a snapshot, 20 ms for a check of 10,000 requests. So calls
    of a method wait for a round, which answers one call of each client with one result that is newer than
    all of them. A client that calls now and then is answered at once; one that floods waits, and no step
    does. `call_utility` (core/stats/engine_facts.py) makes the results.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: dict[UtilityMethod, WaitingCalls] = {}  # none is empty
        self._due_at: dict[UtilityMethod, float] = {}

    def add(self, client: bytes, call: UtilityCall) -> None:
        """Let a call wait for its round; a call beyond MAX_WAITING_CALLS is dropped."""
        ids = self._waiting.setdefault(call.method, {}).setdefault(client, deque())
        if len(ids) < MAX_WAITING_CALLS:
            ids.append(call.call_id)

    def forget(self, client: bytes) -> None:
        """Drop the calls of a client that is gone."""
        for method, calls in list(self._waiting.items()):
            calls.pop(client, None)
            if not calls:
                del self._waiting[method]

    @property
    def next_at(self) -> float | None:
        """When a round is due, None if nothing waits."""
        if not self._waiting:
            return None
        return min(self._due_at.get(method, 0.0) for method in self._waiting)

    def answer(
        self, ask: Callable[[UtilityCall], UtilityResult]
    ) -> list[tuple[bytes, UtilityMethod, UtilityResult]]:
        """The answers of every round that is due: (client, method, result). `ask` is called once a method."""
        answers: list[tuple[bytes, UtilityMethod, UtilityResult]] = []
        for method in list(self._waiting):
            began = self._clock()
            if self._due_at.get(method, 0.0) > began:
                continue
            result = ask(UtilityCall(0, method))
            calls = self._waiting.pop(method)
            answers += [
                (client, method, msgspec.structs.replace(result, call_id=ids.popleft()))
                for client, ids in calls.items()
            ]
            ended = self._clock()
            self._due_at[method] = ended + _REST * (ended - began) * len(calls)
            if left := {client: ids for client, ids in calls.items() if ids}:
                self._waiting[method] = left
        return answers


_log = logging.getLogger(__name__)

_LOCAL = Origin()

OUTBOX_RETRY_S = 0.02  # how soon a client whose queue was full is tried again

# Puts a message into a client's queue; False if the queue is full. Raises ConnectionResetError if the client
# is gone.
Send = Callable[[bytes, msgspec.Struct], bool]


class ClientRegistry:
    """The clients that have said Hello. `core` and `facts` are None until `open`."""

    def __init__(
        self,
        epoch: str,
        started_at: float,
        send: Send,
        clock: Callable[[], float] = time.monotonic,
        group: GroupRoster | None = None,
    ) -> None:
        """`started_at` is wall clock, `clock` monotonic."""
        self.clients: dict[bytes, Client] = {}
        self.core: EngineCore | None = None
        self.facts: EngineFacts | None = None
        self.find_remote_origin: Callable[[bytes], Origin] = lambda _: Origin()  # for `is_remote` identities
        self.leases = LeaseWatch(clock)  # knows when `check_leases` is due
        self._epoch = epoch
        self._started_at = started_at
        self._phase = ""
        self._refusal: Refusal | None = None  # why the engine did not start
        self._has_worker = True
        self._send = send
        self._clock = clock
        self._calls = UtilityCalls(clock)
        self._group = group or GroupRoster()

    def note_phase(self, phase: str) -> None:
        """Tell clients that wait for the start how far it is."""
        self._phase = phase
        for identity in self.clients:
            self.reply(identity, self._progress)

    def note_worker(self, has_worker: bool) -> None:
        """Tell the clients of an open engine that it has lost its worker, or has one again."""
        if has_worker != self._has_worker:
            self._has_worker = has_worker
            for identity in self.clients:
                self.reply(identity, WorkerStatus(has_worker))

    def open(self, core: EngineCore, facts: EngineFacts) -> None:
        """The engine is ready: welcome the clients that wait, and all that come."""
        self.core, self.facts = core, facts
        for identity in self.clients:
            self._welcome(identity, core, facts)

    @property
    def has_owner(self) -> bool:
        """Whether the engine's owner has said Hello."""
        return self._group.owner in self.clients if self._group.owner else bool(self.clients)

    def refuse(self, reason: str, kind: str) -> None:
        """The engine did not start: tell the clients that wait, and all that come. Each says Goodbye."""
        self._refusal = Refusal(reason, kind)
        for identity in self.clients:
            self._send_refusal(identity, self._refusal)

    def _send_refusal(self, identity: bytes, refusal: Refusal) -> None:
        number = self.clients[identity].hello.number
        self.reply(identity, msgspec.structs.replace(refusal, number=number))

    def take(self, identity: bytes, message: object) -> None:
        """Take a client's message. Raises ProtocolError if it is out of place or not the client's to send."""
        core = self.core if identity in self.clients else None
        origin = self._find_origin(identity)
        is_owner = bool(self._group.owner) and identity == self._group.owner
        standing = Standing.OWNER if is_owner else origin.standing
        _check_may_send(message, standing)
        match message:
            case Hello():
                self._welcome_or_refuse(identity, message)
            case Goodbye():
                self.forget(identity)
            case UtilityCall(method=UtilityMethod.PING) if identity in self.clients:
                self.reply(identity, UtilityResult(message.call_id))  # also while the engine starts
            case EngineRoster():
                self._take_roster(identity, message)
            case EngineCoreRequest() if core is not None:
                live = core.add_request(identity, origin.adapt_request(message))
                if live is not None:
                    origin.note_added(message.request_id, live.queued_time)
            case EngineCoreRequests(requests=requests) if core is not None:
                for request in requests:
                    self.take(identity, request)
            case AbortRequests() if core is not None:
                owns = make_owner_test(origin.scope, message.tenant)
                core.abort_requests(identity, message.request_ids, message.names, owns)
            case FrontendCounts() if core is not None:
                if origin.scope:
                    message = self.clients[identity].bound_counts(message, core.count_served(identity))
                core.add_counts(message)
            case UtilityCall() if core is not None:
                if UTILITIES[message.method].find(standing) is Reach.NONE:
                    text = f"{message.method.name} is only for clients on the engine's machine"
                    self.reply(identity, UtilityResult(message.call_id, text))
                else:
                    self._calls.add(identity, message)
            case _:
                raise ProtocolError("Hello and its Welcome come before any other message")

    def forget(self, identity: bytes) -> None:
        """Drop a client and its requests, if there is one."""
        if self.clients.pop(identity, None) is not None and self.core is not None:
            self._calls.forget(identity)
            self._find_origin(identity).note_lost(self.core.remove_client(identity))

    def check_leases(self) -> None:
        """Forget the clients whose connection has ended."""
        for identity in list(self.clients):
            try:
                self._tell(identity, LeaseCheck())
            except ConnectionResetError:
                self._on_client_gone(identity)

    def reply(self, identity: bytes, message: msgspec.Struct) -> None:
        """Queue a message before waiting outputs; send it at once to a sender that is no client."""
        client = self.clients.get(identity)
        if client is not None:
            client.outbox.add_reply(message)
            return
        try:
            self._tell(identity, message)
        except ConnectionResetError:
            _log.debug("the receiver of %s is gone", type(message).__name__)

    @property
    def next_turn_at(self) -> float | None:
        """When the registry has something to do although nothing arrives; None if never."""
        retry_at = None
        for client in self.clients.values():
            if client.outbox:
                retry_at = self._clock() + OUTBOX_RETRY_S
                break
        return find_earliest(self._calls.next_at, self.leases.next_check_at, retry_at)

    def deliver(self) -> None:
        """Send answers and outputs, as far as each client's queue takes them."""
        if self.core is not None:
            for identity, method, result in self._calls.answer(self.answer):
                self.reply(identity, self._adapt_result(identity, method, result, self.core))
            for identity, outputs in self.core.take_outputs().items():
                client = self.clients.get(identity)
                if is_remote(identity):
                    origin = self._find_origin(identity)
                    for output in outputs:
                        if output.finish_reason is not None:
                            origin.note_ended(output.request_id)
                if client is not None:
                    client.outbox.add_outputs(outputs)
        gone: list[bytes] = []
        for identity, client in self.clients.items():
            if not client.outbox:
                continue
            try:
                client.outbox.flush(lambda message, to=identity: self._tell(to, message), self._epoch)
            except ConnectionResetError:
                gone.append(identity)
        for identity in gone:
            self._on_client_gone(identity)

    def answer(self, call: UtilityCall) -> UtilityResult:
        """The answer to a utility call of an open engine, at once."""
        assert self.core is not None
        now = self._clock()
        clients = {identity: client.describe(now) for identity, client in self.clients.items()}
        return call_utility(self.core, call, CoreProcessInfo(self._epoch, self._started_at, clients))

    def _welcome_or_refuse(self, identity: bytes, hello: Hello) -> None:
        if hello.protocol_version != PROTOCOL_VERSION:
            reason = f"this engine speaks protocol version {PROTOCOL_VERSION}, not {hello.protocol_version}"
            self.reply(identity, Refusal(reason, "DaemonError", hello.number))
            return
        try:
            adapted = self._find_origin(identity).adapt_hello(hello)
        except DaemonError as error:
            self.reply(identity, Refusal(str(error), "DaemonError", hello.number))
            return
        self.forget(identity)  # it begins anew, and will add again the requests that it still has
        hello = msgspec.structs.replace(adapted, client_kind=make_printable(adapted.client_kind))
        self.clients[identity] = Client(hello, self._clock())
        if self.core is not None and self.facts is not None:
            self._welcome(identity, self.core, self.facts)
        elif self._refusal is not None:
            self._send_refusal(identity, self._refusal)
        else:
            self.reply(identity, self._progress)

    @property
    def _progress(self) -> StartupProgress:
        return StartupProgress(self._phase, self._group.index, self._group.roster)

    def _welcome(self, identity: bytes, core: EngineCore, facts: EngineFacts) -> None:
        hello = self.clients[identity].hello
        origin = self._find_origin(identity)
        core.set_client(identity, origin.find_share(hello))
        facts = origin.adapt_facts(facts)
        group, number = self._group, hello.number
        self.reply(
            identity,
            Welcome(
                PROTOCOL_VERSION, self._epoch, facts, number, group.index, group.roster, self._has_worker
            ),
        )

    def _find_origin(self, identity: bytes) -> Origin:
        return self.find_remote_origin(identity) if is_remote(identity) else _LOCAL

    def _tell(self, identity: bytes, message: msgspec.Struct) -> bool:
        """As `Send`, of what this client is told."""
        if is_remote(identity):
            message = self._find_origin(identity).adapt_told(message)
        return self._send(identity, message)

    def _adapt_result(
        self, identity: bytes, method: UtilityMethod, result: UtilityResult, core: EngineCore
    ) -> UtilityResult:
        origin = self._find_origin(identity)
        if result.digest is not None and origin.scope:
            result = msgspec.structs.replace(result, digest=core.digests.make(origin.scope))
        return origin.adapt_result(method, result)

    def _take_roster(self, identity: bytes, roster: EngineRoster) -> None:
        """Pass a changed roster on to all clients, those included that wait for their Welcome."""
        if roster == self._group.roster:
            return
        self._group.roster = roster
        for client in self.clients:
            if client != identity:
                self.reply(client, self._progress if self.core is None else roster)

    def _on_client_gone(self, identity: bytes) -> None:
        hello = self.clients[identity].hello
        _log.info("client %s (pid %d) is gone", hello.client_kind, hello.pid)
        self.forget(identity)


def _check_may_send(message: object, standing: Standing) -> None:
    """Raise ProtocolError unless clients of this standing may send such a message."""
    right = MESSAGES.get(type(message)) if isinstance(message, msgspec.Struct) else None
    name = type(message).__name__
    if right is None:
        raise ProtocolError(f"{name} is not for the engine")
    if right.find(standing) is Reach.NONE:
        allowed = " or ".join(kind.value for kind in Standing if right.find(kind) is not Reach.NONE)
        raise ProtocolError(f"{name} is taken from {allowed} only")
