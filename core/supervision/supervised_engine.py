"""SupervisedEngine: one engine of a daemon, whose core is replaced when it is lost.

It does not know of other engines, and decides nothing for the daemon: its owner reads `state` and `failure`
after each turn.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from ...ipc.daemon.daemon_state import SUPERVISOR_ROLE, EngineState, FailedReport
from ...ipc.errors import FINAL_KINDS, DaemonError, FilesChangedError, ProtocolError, QuireError
from ...ipc.processes.child_args import NetworkArgs
from ...ipc.processes.due import find_earliest
from ...ipc.processes.managed_child import STOP_GRACE_S, CoreChild
from ...ipc.processes.process import EXIT_CORE_LOST, EXIT_START_FAILED
from ...ipc.protocol.client_protocol import ClientProtocol
from ...ipc.protocol.codec import make_client_codec
from ...ipc.protocol.messages import EngineRoster, UtilityMethod
from ...ipc.protocol.protocol_link import ProtocolLink

_LOOK_INTERVAL_S = 0.1
# Idle answers in a row: what frontends had sent before they heard of the drain has arrived by then.
_NUM_IDLE_LOOKS = 3


class DrainWatch:
    """Finds out when a draining engine has nothing left to do. Pure.

    It asks for stats over `protocol`, the supervisor's conversation with the core, until the core is empty.
    """

    def __init__(self, protocol: ClientProtocol) -> None:
        self._protocol = protocol
        self._call_id: int | None = None
        self._look_at = 0.0
        self._num_idle = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing runs or waits in the engine."""
        return self._num_idle >= _NUM_IDLE_LOOKS

    @property
    def next_look_at(self) -> float | None:
        """When `look` is due although nothing arrives, None if never. Monotonic."""
        return None if self.is_empty or self._call_id is not None else self._look_at

    def look(self, now: float) -> None:
        """Take an answer that has come, and ask again when it is time."""
        if self._call_id is not None and (answer := self._protocol.answers.get(self._call_id)) is not None:
            self._protocol.end_call(self._call_id)
            self._call_id, self._look_at = None, now + _LOOK_INTERVAL_S
            stats = answer.stats
            is_idle = stats is not None and not stats.num_running and not stats.num_waiting
            self._num_idle = self._num_idle + 1 if is_idle else 0
        if self._call_id is None and now >= self._look_at and not self.is_empty:
            self._call_id = self._protocol.start_call(UtilityMethod.STATS)


_CODEC = make_client_codec()


class CoreLink(ProtocolLink):
    """The supervisor's conversation with one core process, from its start to its end.

    It watches the core, and sends it the roster of engines.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], core: CoreChild) -> None:
        super().__init__(context, core.address, SUPERVISOR_ROLE, core.owner_identity)
        self._watch = core.watch if core.is_watched else None
        self._unsent_roster: EngineRoster | None = None
        self.protocol.engine_started(self._watch)

    def connect(self, now: float) -> None:
        """Connect, and watch the core from then on, also while it starts.

        An idle core is pinged 1.4 times a second, which takes 0.05 % of a processor in each of the two
        processes.
        """
        if self.has_connected:
            return
        super().connect(now)
        if self.has_connected and self._watch is not None:
            self._watch.start(now)

    def send_waiting(self) -> None:
        super().send_waiting()
        if self._unsent_roster is not None and self.has_connected and not self.protocol.outbox:
            with contextlib.suppress(zmq.ZMQError):
                self.socket.send_multipart(_CODEC.encode(self._unsent_roster), zmq.NOBLOCK)
                self._unsent_roster = None

    def tell_roster(self, roster: EngineRoster) -> None:
        """Send the core a roster with the next `send_waiting`; the core passes it on to its clients."""
        self._unsent_roster = roster


_log = logging.getLogger(__name__)

_HELLO_RETRY_S = 0.02


@dataclass(frozen=True, slots=True)
class EngineFailure:
    """Why an engine will not run again. `exit_code`: the daemon's, if it ends for that."""

    report: FailedReport
    exit_code: int


class SupervisedEngine:
    """Keeps one engine core running until it is stopped or has failed.

    Its sockets and processes are in `poller`; `on_phase` is called with each phase of a core's start.
    """

    def __init__(
        self,
        core: CoreChild,
        state: EngineState,
        context: zmq.Context[zmq.Socket[bytes]],
        poller: zmq.Poller,
        on_phase: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = state
        self.rank = 0  # the number of its share of the machine
        self.lost_at = 0.0  # when its last core was lost, monotonic
        self.failure: EngineFailure | None = None
        self._core = core
        self._context = context
        self._poller = poller
        self._on_phase = on_phase
        self._link: CoreLink | None = None  # while there is a core
        self.has_been_ready = False  # whether any of its cores was
        self._final_report: FailedReport | None = None  # why the core will not run again
        self._is_draining = False
        self._drain: DrainWatch | None = None  # while a core drains
        self._clock = clock
        core.start_at = clock()

    @property
    def is_open(self) -> bool:
        """Whether its core serves clients."""
        return self.state.state in ("ready", "draining", "drained")

    @property
    def is_draining(self) -> bool:
        """Whether it gets no new requests."""
        return self._is_draining

    def drain(self) -> None:
        """Have frontends move their requests away until `resume`; it is "drained" when it is empty."""
        self._is_draining = True
        self._watch_drain()

    def resume(self) -> None:
        """Let it take requests again."""
        self._is_draining = False
        self._drain = None
        self._update_state()

    def tell_roster(self, roster: EngineRoster) -> None:
        """Send a roster to the core that runs, and to each that will."""
        self._core.set_roster(roster)
        if self._link is not None:
            self._link.tell_roster(roster)
            self._link.send_waiting()

    def set_share(self, rank: int, num_engines: int) -> None:
        """Set the next core's share of the machine: `rank` of `num_engines`."""
        self.rank = rank
        self._core.set_share(rank, num_engines)

    def set_network(self, network: NetworkArgs) -> None:
        """Set where its next core listens for clients of other machines."""
        self._core.set_network(network)

    def start_if_due(self, now: float) -> bool:
        """Start a core if one is due. Returns whether one was."""
        if not self._core.is_due(now):
            return False
        try:
            self._core.start()
        except FilesChangedError as error:
            self._core.start_at = None
            self._fail(FailedReport(str(error), type(error).__name__), EXIT_START_FAILED)
            return True
        process = self._core.process
        assert process is not None
        self._link = CoreLink(self._context, self._core)
        if self._is_draining:
            self._watch_drain()
        self._poller.register(self._link.socket, zmq.POLLIN)
        self._poller.register(process.pid_fd, zmq.POLLIN)
        self.state.pid = process.pid
        return True

    @property
    def next_check_at(self) -> float | None:
        """When there is something to do although nothing arrives. Monotonic, as all times."""
        retry_at = look_at = None
        if self._link is not None and not self._link.has_connected:
            retry_at = self._clock() + _HELLO_RETRY_S
        elif self._link is not None and self._link.protocol.is_open and self._drain is not None:
            look_at = self._drain.next_look_at
        return find_earliest(self._core.next_check_at, retry_at, look_at)

    def follow(self, ready: dict[object, int], now: float) -> None:
        """Take its core's messages, and its end. `ready` is the poller's result."""
        link = self._link
        if link is None:
            return
        if not link.has_connected:
            link.connect(now)
        while self._receive(link, now):
            pass
        if self._link is not link:
            return
        if self._drain is not None and link.protocol.is_open:
            self._drain.look(now)
            self._update_state()
        link.protocol.time_passed(now)
        link.send_waiting()
        if self._core.process is not None and self._core.process.pid_fd in ready:
            self._on_core_lost()

    def restart(self) -> None:
        """End the core, if there is one, and start another in the next turn; also after a failure."""
        self._forget_core()
        if self.failure is not None:
            self.failure = self._final_report = None
            self._core.forgive()
        self._core.start_at = self._clock()
        self._note_restart()

    def begin_stop(self) -> None:
        """Have the core end, and start no other."""
        self._core.start_at = None
        if self._core.process is not None:
            self._core.process.close_lifeline()

    def stop(self) -> None:
        """End the core and its worker for good; waits for that. Idempotent."""
        self._core.start_at = None
        self._forget_core()
        self._core.remove_socket()

    def _receive(self, link: CoreLink, now: float) -> bool:
        """Take one message, False if there is none."""
        protocol = link.protocol
        phase = protocol.phase
        try:
            if not link.receive(now):
                return False
        except ProtocolError as error:
            _log.warning("from the engine core: %s", error)
        except QuireError as error:
            self._note_refusal(protocol, error)
            if isinstance(error, DaemonError):  # it runs, and does not accept this supervisor
                self._on_core_lost()
                return False
        if protocol.phase is not None and protocol.phase != phase:
            self._on_phase(protocol.phase)
        if protocol.is_open and not self.is_open:
            self.has_been_ready = True
            self._update_state()
        return True

    def _watch_drain(self) -> None:
        if self._link is not None:
            self._drain = DrainWatch(self._link.protocol)
            self._update_state()

    def _update_state(self) -> None:
        """Set whether a core that serves clients is ready, draining or drained."""
        if self._link is not None and self._link.protocol.is_open:
            is_empty = self._drain is not None and self._drain.is_empty
            self.state.state = "drained" if is_empty else "draining" if self._is_draining else "ready"

    def _note_refusal(self, protocol: ClientProtocol, error: QuireError) -> None:
        """Note a core's refusal. After a good start, it is final only if the model, its options or the core's
        end are the cause.
        """
        kind = type(error).__name__
        if not self.has_been_ready or kind in FINAL_KINDS or protocol.end_reason is not None:
            self._final_report = FailedReport(str(error), kind)

    def _on_core_lost(self) -> None:
        reason = self._forget_core()
        self.lost_at = self._clock()
        if self._final_report is not None:  # another core would refuse, too
            self._fail(self._final_report, EXIT_START_FAILED)
        elif self._core.replace(reason, self.lost_at):
            self.state.last_loss = reason
            self._note_restart()
        else:
            self._fail(FailedReport(self._core.end_reason or reason), EXIT_CORE_LOST)

    def _fail(self, report: FailedReport, exit_code: int) -> None:
        self.failure = EngineFailure(report, exit_code)
        self._core.remove_socket()
        self.state.state, self.state.last_loss = "lost", report.reason

    def _note_restart(self) -> None:
        self.state.num_restarts += 1
        self.state.state = "restarting"

    def _forget_core(self) -> str:
        """End the core and its worker, if there are any. Returns how the core has ended."""
        link, self._link = self._link, None
        self._drain = None
        if link is None or self._core.process is None:
            return ""
        self._poller.unregister(link.socket)
        self._poller.unregister(self._core.process.pid_fd)
        self.state.pid = None
        reason = self._core.stop(STOP_GRACE_S)
        link.socket.close(linger=0)
        return reason
