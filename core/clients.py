"""The core's clients: who they are, what each is still owed, and which of them may be gone.

A ROUTER does not say who has left: its monitor tells only that some connection has ended. Sending to a peer
that is gone fails, so after such an event every client is sent a LeaseCheck. The event may overtake the
socket's own bookkeeping, hence a few rounds of it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq
from zmq.utils.monitor import parse_monitor_message

from ..ipc.messages import Hello
from .outbox import Outbox
from .stats_collector import AttachedClient

_CHECKS_AFTER_S = (0.0, 0.05, 0.5)
_REST = 20  # times the cost of a check before the next: a storm of connections takes 5 % of the core's time


@dataclass(slots=True)
class Client:
    """One conversation with a frontend, from its Hello on."""

    hello: Hello
    connected_at: float  # monotonic
    outbox: Outbox = field(default_factory=Outbox)

    def describe(self) -> AttachedClient:
        """What a snapshot says of it."""
        connected_s, hello = time.monotonic() - self.connected_at, self.hello
        return AttachedClient(hello.client_kind, hello.pid, hello.weight, self.outbox.num_unsent, connected_s)


class LeaseWatch:
    """Says when clients are to be checked."""

    def __init__(self, router: zmq.Socket[bytes], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        events = zmq.EVENT_DISCONNECTED | zmq.EVENT_ACCEPTED
        self.monitor: zmq.Socket[bytes] = router.get_monitor_socket(events)
        self._due: list[float] = []  # monotonic, sorted
        self._not_before = 0.0

    @property
    def next_check_at(self) -> float | None:
        """When the next check is due, None if none is."""
        return max(self._due[0], self._not_before) if self._due else None

    def read_events(self) -> bool:
        """Take what the monitor says; True if somebody has connected."""
        events: set[int] = set()
        with contextlib.suppress(zmq.Again):
            while True:
                events.add(parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))["event"])
        if zmq.EVENT_DISCONNECTED in events:
            now = self._clock()
            self._due = sorted(now + after_s for after_s in _CHECKS_AFTER_S)
        return zmq.EVENT_ACCEPTED in events

    def check_if_due(self, check: Callable[[], None]) -> None:
        """Call `check` if its time has come. It costs as much as there are clients, so it then rests."""
        due_at, now = self.next_check_at, self._clock()
        if due_at is None or due_at > now:
            return
        self._due = [at for at in self._due if at > now]
        check()
        ended = self._clock()
        self._not_before = ended + _REST * (ended - now)
