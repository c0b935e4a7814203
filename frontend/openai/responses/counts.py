"""ResponseCounts: what an HTTP process keeps and runs of responses, as /metrics tells it."""

from __future__ import annotations

from array import array

from ..bodies.responses import ResponseStatus

# Where a number stands: gauges, a counter, then a counter for each way in which a background response ends.
STORED, STORED_BYTES, RUNNING, EVICTED = range(4)
ENDS: tuple[ResponseStatus, ...] = ("completed", "incomplete", "cancelled", "failed")
NUM_NUMBERS = EVICTED + 1 + len(ENDS)


class ResponseCounts:
    """The numbers of one process, which it alone writes."""

    def __init__(self) -> None:
        self._numbers: array[int] | memoryview[int] = array("Q", bytes(8 * NUM_NUMBERS))

    def write_to(self, numbers: memoryview[int]) -> None:
        """Count in this memory from now on, where a lost process may have left what it had."""
        numbers[:EVICTED] = self._numbers[:EVICTED]
        self._numbers = numbers

    def note_stored(self, num_responses: int, num_bytes: int) -> None:
        """So many are kept."""
        self._numbers[STORED], self._numbers[STORED_BYTES] = num_responses, num_bytes

    def note_evicted(self) -> None:
        """One is forgotten before its time, for want of room."""
        self._numbers[EVICTED] += 1

    def begin_background(self) -> None:
        """One more runs in the background."""
        self._numbers[RUNNING] += 1

    def end_background(self, status: ResponseStatus) -> None:
        """One runs no more; a status that is not final: it was refused."""
        self._numbers[RUNNING] -= 1
        if status in ENDS:
            self._numbers[EVICTED + 1 + ENDS.index(status)] += 1
