"""History: what the engine did in the last quarter of an hour. It knows no clock and no scheduler."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from ...ipc.protocol.engine_views import EngineHistory, HistoryPoint

PERIOD_S = 5.0
NUM_POINTS = 180
Values = Mapping[str, float]  # by the names of HistoryPoint


class History:
    """A point for each PERIOD_S in which the engine had work; an idle engine notes nothing."""

    def __init__(self, count: Callable[[], Values], gauge: Callable[[], Values]) -> None:
        """`count`: what only grows; `gauge`: what is there at the moment, a point has the highest."""
        self._count = count
        self._gauge = gauge
        self._before = count()
        self._points: deque[HistoryPoint] = deque(maxlen=NUM_POINTS)

    def note(self, now: float, is_start: bool) -> None:
        """Called twice a second around steps, before one changes the counts.

        `is_start`: nothing is in flight, so that what waits is about to run, and is no queue.
        """
        self._add_counts()
        at = now // PERIOD_S * PERIOD_S
        if not self._points or self._points[-1].at != at:
            self._points.append(HistoryPoint(at=at))
        point = self._points[-1]
        for name, value in self._gauge().items() if not is_start else ():
            setattr(point, name, max(value, getattr(point, name)))

    def look(self, now: float, kv_blocks_total: int) -> EngineHistory:
        """All points up to `now`, the oldest first."""
        self._add_counts()
        points = list(self._points)
        return EngineHistory(at=now, period_s=PERIOD_S, kv_blocks_total=kv_blocks_total, points=points)

    def _add_counts(self) -> None:
        """What was counted since the last note belongs to its period: nothing was since its steps ended."""
        counts = self._count()
        for name, value in counts.items() if self._points else ():
            setattr(self._points[-1], name, getattr(self._points[-1], name) + value - self._before[name])
        self._before = counts
