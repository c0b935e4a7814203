"""SimClient: a frontend with the real ClientProtocol, EngineConnection and OutputProcessor in it.

It adds a transport over the simulated network, and the order in which it looks: `sync` reads what has arrived
before it looks at the connection, `async` learns of either first.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Literal

from ...frontend.client.engine_connection import EngineConnection
from ...frontend.client.engines import Engine
from ...frontend.input_processor import EngineInput
from ...frontend.output_processor import OutputProcessor, Sink
from ...frontend.pooling.state import PoolingInput
from ...ipc.errors import QuireError
from ...ipc.messages import MESSAGE_TYPES, ProtocolNotice
from .network import Connection, Network, Timeline
from .sim_core import SimCore

_RECONNECT_S = 0.02
_LONGEST_LAG_S = 0.01
_NOTICE = next(head for head, kind in MESSAGE_TYPES.items() if kind is ProtocolNotice)


class Violation(Exception):
    """Something that must hold does not."""


class _Anchor(Engine):
    """An engine that is always there, or will be again."""

    def check_owner(self) -> None:
        pass

    def describe_end(self) -> None:
        return None

    def stop(self) -> None:
        pass


class SimClient:
    """A client that connects as soon as there is a core, and again whenever its connection has ended."""

    failure: str | None = None  # its connections can always be made again

    def __init__(
        self,
        identity: bytes,
        kind: Literal["sync", "async"],
        network: Network,
        timeline: Timeline,
        rng: random.Random,
        find_core: Callable[[], SimCore | None],
    ) -> None:
        self.identity = identity
        self.stopped_until = 0.0
        self.is_dead = False
        self._kind = kind
        self._network = network
        self._timeline = timeline
        self._rng = rng
        self._find_core = find_core
        self._link = EngineConnection(_Anchor(), self, "simulated", 1.0)
        self._protocol = self._link.protocol
        self._processor = OutputProcessor(None)
        self._connection: Connection | None = None
        self._events: list[bool] = []  # of the connection, not yet noticed
        self._inbox: deque[tuple[bytes, ...]] = deque()
        self._before_attach: list[Callable[[], None]] = []
        self._connect_soon()

    @property
    def num_unfinished(self) -> int:
        """Requests that its user still waits for."""
        return self._processor.num_unfinished

    @property
    def num_resumable(self) -> int:
        """Requests in the ledger."""
        return len(self._protocol.ledger)

    # -- what its user does

    def add(self, make: Callable[[], EngineInput | PoolingInput], sink: Sink) -> None:
        """Add a request, once the engine was ready for the first time."""

        def add_now() -> None:
            request = make()
            self._processor.add_request(request, sink)
            self._protocol.add_requests([request.sequences[0]], self._timeline.now)
            self._link.send_waiting(self._timeline.now)

        if self._protocol.facts is None:
            self._before_attach.append(add_now)
        else:
            self._when_awake(add_now)

    def abort(self, name: str) -> None:
        """Abort a request; nothing happens if it has ended."""

        def abort_now() -> None:
            ids = self._processor.find_engine_ids([name])
            if ids:
                self._protocol.abort_requests(ids)
                self._link.send_waiting(self._timeline.now)

        self._when_awake(abort_now)

    def abort_named(self, name: str) -> None:
        """Abort a request of any client by its name; lost while the engine cannot be reached."""

        def abort_now() -> None:
            self._protocol.abort_named([name], "")
            self._link.send_waiting(self._timeline.now)

        self._when_awake(abort_now)

    # -- faults

    def crash(self) -> None:
        """Its process ends."""
        self.is_dead = True
        self.lose_connection()

    def lose_connection(self) -> None:
        """Its connection ends, if there is one."""
        if self._connection is not None and not self._connection.is_cut:
            self._network.lose(self._connection)

    # -- what EngineConnection sends and receives by

    def send(self, frames: tuple[bytes]) -> bool:
        """Send if there is a connection."""
        if self._connection is not None:
            self._network.send_up(self._connection, frames)
        return self._connection is not None

    def receive(self) -> list[bytes] | None:
        """The next message that has arrived. Violation if it complains: all that is sent here can be read."""
        if not self._inbox:
            return None
        frames = list(self._inbox.popleft())
        if frames[0].startswith(_NOTICE):
            raise Violation(f"a frame of {self.identity!r} was refused: {frames[0][1:]!r}")
        return frames

    def read_connection_events(self) -> list[bool]:
        """What has become of the connection."""
        events, self._events = self._events, []
        return events

    # -- the network's side

    def arrive(self, frames: tuple[bytes, ...]) -> None:
        """A message has arrived at the socket."""
        self._inbox.append(frames)
        self._wake()

    def note_connection(self, connection: Connection, is_up: bool) -> None:
        """The socket's monitor has news."""
        if connection is not self._connection:
            return
        if not is_up:
            self._connection = None
            self._connect_soon()
        self._events.append(is_up)
        self._wake()

    # -- what it does by itself

    def _connect_soon(self) -> None:
        self._timeline.call_at(self._timeline.now + self._rng.uniform(0.0, _RECONNECT_S), self._connect)

    def _connect(self) -> None:
        core = self._find_core()
        if self.is_dead:
            return
        if core is None:
            self._connect_soon()
            return
        self._connection = self._network.connect(core, self)
        self.note_connection(self._connection, True)

    def _when_awake(self, action: Callable[[], None]) -> None:
        def act() -> None:
            if not self.is_dead:
                action()

        if self.stopped_until > self._timeline.now:
            self._timeline.call_at(self.stopped_until, act)
        else:
            act()

    def _wake(self) -> None:
        lag_s = self._rng.uniform(0.0, _LONGEST_LAG_S) * self._rng.choice([1.0, 1.0, 1.0, 10.0])
        at = max(self.stopped_until, self._timeline.now + lag_s)
        self._timeline.call_at(at, self._pump)

    def _pump(self) -> None:
        """Take what has arrived and notice what has become of the connection."""
        if self.is_dead:
            return
        if self.stopped_until > self._timeline.now:
            self._timeline.call_at(self.stopped_until, self._pump)
            return
        now = self._timeline.now
        if self._kind == "async" and self._rng.random() < 0.5:
            self._link.follow_connection(now)
        while (frames := self._link.receive(now)) is not None:
            self._take(frames)
        self._link.follow_connection(now)
        self._link.send_waiting(now)

    def _take(self, frames: list[bytes]) -> None:
        try:
            outputs = self._link.take(frames, self._timeline.now)
        except QuireError as error:
            raise Violation(f"the client's user gets a {type(error).__name__}: {error}") from None
        processed = self._processor.process_outputs(outputs)
        if processed.ids_to_abort:
            raise Violation(f"{processed.ids_to_abort} came with a gap")
        if self._protocol.is_open:
            actions, self._before_attach = self._before_attach, []
            for action in actions:
                action()
