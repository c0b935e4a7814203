"""DrainWatch: whether an engine from which its frontends withdraw has something to do. Pure."""

from __future__ import annotations

from ...ipc.client_protocol import ClientProtocol
from ...ipc.messages import UtilityMethod

_LOOK_INTERVAL_S = 0.1
# So many idle answers in a row: what frontends sent before they heard of the drain has come by then.
_NUM_IDLE_LOOKS = 3


class DrainWatch:
    """Asks over `protocol`, the supervisor's own conversation with a core, until the core is empty."""

    def __init__(self, protocol: ClientProtocol) -> None:
        self._protocol = protocol
        self._call_id: int | None = None
        self._look_at = 0.0
        self._num_idle = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing runs or waits there."""
        return self._num_idle >= _NUM_IDLE_LOOKS

    @property
    def next_look_at(self) -> float | None:
        """When `look` is due though nothing arrives, None if never. Monotonic."""
        return None if self.is_empty or self._call_id is not None else self._look_at

    def look(self, now: float) -> None:
        """Take an answer, ask again when it is time."""
        if self._call_id is not None and (answer := self._protocol.answers.get(self._call_id)) is not None:
            self._protocol.end_call(self._call_id)
            self._call_id, self._look_at = None, now + _LOOK_INTERVAL_S
            stats = answer.stats
            is_idle = stats is not None and not stats.num_running and not stats.num_waiting
            self._num_idle = self._num_idle + 1 if is_idle else 0
        if self._call_id is None and now >= self._look_at and not self.is_empty:
            self._call_id = self._protocol.start_call(UtilityMethod.STATS)
