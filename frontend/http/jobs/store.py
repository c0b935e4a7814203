"""What is kept of responses, so that they can be continued: in memory, for a time, within a bound.

Knows no HTTP, no other process, and no clock but the one that it is given.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile

from .event_log import EventLog

_RECORD_BYTES = 1024  # of a record beside its texts
# Where a number stands: gauges, a counter, then a counter for each way in which a background response ends.
STORED, STORED_BYTES, RUNNING, EVICTED = range(4)
ENDS = ("completed", "incomplete", "cancelled", "failed")
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

    def end_background(self, status: str) -> None:
        """One runs no more; a status that is not final: it was refused."""
        self._numbers[RUNNING] -= 1
        if status in ENDS:
            self._numbers[EVICTED + 1 + ENDS.index(status)] += 1


@dataclass(slots=True)
class Record:
    """A response with its conversation. `response`: its JSON, b"" while it runs.

    items: JSON lists of the conversation's items, turn by turn; the response's own are the last once it has
    ended. Responses that continue each other share them, and each is counted as if it had its own.
    log: the events of one that runs in the background; log_bytes: what it took when it was last counted.
    """

    owner: str
    tenant: str
    items: tuple[bytes, ...]
    num_items: int
    response: bytes = b""
    expires_at: float = 0.0
    log: EventLog | None = None
    log_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """What it counts for."""
        return _RECORD_BYTES + sum(map(len, self.items)) + len(self.response) + self.log_bytes


class ResponseStore:
    """The responses of one HTTP process.

    `owner`: who may see a response. `tenant`: whose share of the bound it takes. When the bound is passed,
    the tenant with the most bytes loses what it has not used for longest, first of what has ended: nobody
    loses anything to the others who has less than an equal share. max_bytes 0: nothing is kept.
    `tell_dropped` is called with the id of what is forgotten though nobody asked for that.
    """

    def __init__(
        self,
        max_bytes: int,
        keep_s: float,
        now: Callable[[], float],
        tell_dropped: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.max_bytes = max_bytes
        self._keep_s = keep_s
        self._now = now
        self._tell_dropped = tell_dropped
        self.counts = ResponseCounts()
        self._records: dict[str, Record] = {}  # by response id, the one used last at the end
        self._ids_of: dict[str, dict[str, None]] = {}  # by tenant, likewise
        self._bytes_of: dict[str, int] = {}
        self.num_bytes = 0

    def __contains__(self, response_id: str) -> bool:
        return response_id in self._records

    def __len__(self) -> int:
        return len(self._records)

    def add(self, response_id: str, record: Record) -> None:
        """Keep a response from its beginning on: what it was asked is counted while it runs."""
        self.drop_expired()
        record.log_bytes = 0 if record.log is None else record.log.num_bytes
        if record.num_bytes <= self.max_bytes:
            self._put(response_id, record)
        else:
            self._evict(response_id)

    def finish(self, response_id: str, response: bytes, output: bytes, num_items: int) -> None:
        """It has ended, with these items as its output. Nothing happens if it is kept no more."""
        record = self._take(response_id)
        if record is None:
            return
        record.response = response
        record.items += (output,)
        record.num_items += num_items
        self.add(response_id, record)

    def grow(self, response_id: str) -> None:
        """Its log has grown. Nothing happens if it is kept no more."""
        if (record := self._take(response_id)) is not None:
            self.add(response_id, record)

    def find(self, response_id: str, owner: str) -> Record | None:
        """A response of this owner, which is kept for as long again; None if there is none."""
        self.drop_expired()
        record = self._records.get(response_id)
        if record is None or record.owner != owner:
            return None
        self._take(response_id)
        self._put(response_id, record)
        return record

    def remove(self, response_id: str, owner: str) -> bool:
        """Forget a response; False if this owner has no such one."""
        self.drop_expired()
        record = self._records.get(response_id)
        if record is None or record.owner != owner:
            return False
        self._take(response_id)
        return True

    def drop_expired(self) -> float | None:
        """Forget what has been kept long enough; returns when the next will have been."""
        now = self._now()
        expired = takewhile(lambda item: item[1].expires_at <= now, self._records.items())
        for response_id, record in list(expired):
            self._take(response_id)
            if record.response:
                self._tell_dropped(response_id)
            else:  # it runs: its time counts from its end
                self._put(response_id, record)
        return next((record.expires_at for record in self._records.values()), None)

    def _put(self, response_id: str, record: Record) -> None:
        record.expires_at = self._now() + self._keep_s
        self._records[response_id] = record
        self._ids_of.setdefault(record.tenant, {})[response_id] = None
        self._count(record.tenant, record.num_bytes)
        while self.num_bytes > self.max_bytes:
            ids = self._ids_of[max(self._bytes_of, key=self._bytes_of.__getitem__)]
            ended = (ended_id for ended_id in ids if self._records[ended_id].response)
            self._take(evicted := next(ended, next(iter(ids))))
            self._evict(evicted)

    def _evict(self, response_id: str) -> None:
        self.counts.note_evicted()
        self._tell_dropped(response_id)

    def _take(self, response_id: str) -> Record | None:
        record = self._records.pop(response_id, None)
        if record is None:
            return None
        del self._ids_of[record.tenant][response_id]
        self._count(record.tenant, -record.num_bytes)
        if not self._ids_of[record.tenant]:
            del self._ids_of[record.tenant], self._bytes_of[record.tenant]
        return record

    def _count(self, tenant: str, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._bytes_of[tenant] = self._bytes_of.get(tenant, 0) + num_bytes
        self.counts.note_stored(len(self._records), self.num_bytes)
