"""The core's clients: who they are, what each is still owed, and which of them may be gone.

A ROUTER's monitor tells only that some connection has ended. Sending to a peer that is gone fails, so every
client is then sent a LeaseCheck, a few times: the event may overtake the socket's own bookkeeping.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ...ipc.messages import Hello
from ..stats.stats_collector import AttachedClient
from .outbox import Outbox

_CHECKS_AFTER_S = (0.0, 0.05, 0.5)
_REST = 20  # times the cost of a check before the next: a storm of connections takes 5 % of the core's time


@dataclass(slots=True)
class Client:
    """A frontend that is connected, from its Hello on."""

    hello: Hello
    connected_at: float  # monotonic
    outbox: Outbox = field(default_factory=Outbox)

    def describe(self, now: float) -> AttachedClient:
        """What a snapshot says of it at a monotonic time."""
        connected_s, hello = now - self.connected_at, self.hello
        return AttachedClient(hello.client_kind, hello.pid, hello.weight, self.outbox.num_unsent, connected_s)


class LeaseWatch:
    """Says when clients are to be checked. `clock` is monotonic."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._due: list[float] = []  # sorted
        self._not_before = 0.0

    @property
    def next_check_at(self) -> float | None:
        """When the next check is due, None if none is."""
        return max(self._due[0], self._not_before) if self._due else None

    def note_disconnect(self) -> None:
        """A connection has ended."""
        now = self._clock()
        self._due = [now + after_s for after_s in _CHECKS_AFTER_S]

    def check_if_due(self, check: Callable[[], None]) -> None:
        """Call `check` if its time has come. It costs as much as there are clients, so it then rests."""
        due_at = self.next_check_at
        if due_at is None or due_at > (now := self._clock()):
            return
        self._due = [at for at in self._due if at > now]
        check()
        ended = self._clock()
        self._not_before = ended + _REST * (ended - now)
