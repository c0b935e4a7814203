"""SendWindow: how much a client has sent that its engine has not read. Pure; of engines over the network.

Such an engine cuts off whose messages fill its memory unread (core/network/network_listener.py), so an honest
client with a large batch waits. Its PINGs are answered in the order in which all that it sends is read.
"""

from __future__ import annotations

from collections import deque

from .codec import make_client_codec
from .messages import UtilityCall, UtilityMethod

# Half of what an engine takes of a connection. 80 MB/s at 100 ms a round.
MAX_UNREAD_BYTES = 8 << 20
PING_BYTES = 1 << 20  # after so many bytes it is asked whether they are read


class SendWindow:
    """Of one connection. Its calls have ids below 0, which are nobody else's."""

    def __init__(self, max_unread_bytes: int = MAX_UNREAD_BYTES, ping_bytes: int = PING_BYTES) -> None:
        self._max_unread_bytes, self._ping_bytes = max_unread_bytes, ping_bytes
        self._codec = make_client_codec()
        self._last_id = 0
        self._num_unasked = 0  # bytes since the last PING
        self._asked: deque[tuple[int, int]] = deque()  # PINGs without an answer: id, bytes before it

    @property
    def is_full(self) -> bool:
        """Whether nothing may be sent until a PING is answered."""
        return sum(num_bytes for _, num_bytes in self._asked) >= self._max_unread_bytes

    def make_ping(self) -> tuple[bytes] | None:
        """The PING to send before the next message, None if none is due. Once it is sent: `note_ping`."""
        if self._num_unasked < self._ping_bytes:
            return None
        return self._codec.encode(UtilityCall(self._last_id - 1, UtilityMethod.PING))

    def note_ping(self) -> None:
        """The PING was sent."""
        self._last_id -= 1
        self._asked.append((self._last_id, self._num_unasked))
        self._num_unasked = 0

    def note_sent(self, num_bytes: int) -> None:
        """A message of so many bytes was sent."""
        self._num_unasked += num_bytes

    def note_answer(self, call_id: int) -> None:
        """A call was answered, maybe a PING: what was sent before it is read."""
        if any(call_id == ping_id for ping_id, _ in self._asked):
            while self._asked.popleft()[0] != call_id:
                pass

    def reset(self) -> None:
        """The connection begins anew: nothing that was sent is unread any more."""
        self._num_unasked = 0
        self._asked.clear()
