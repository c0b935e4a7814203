"""Room: what the requests of one HTTP process may take together, shared by those who ask (ipc/fair_share.py).

Places for sequences, and bytes for the logprobs of answers, which are collected until they are whole.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ...ipc.fair_share import has_room
from .errors import overloaded


@dataclass(frozen=True, slots=True)
class Stay:
    """What one engine request takes."""

    tenant: str
    num_sequences: int
    logprobs_bytes: int = 0


class Room:
    """Counts who takes how much. Raises ApiErrors with status 429."""

    def __init__(self, max_logprobs_bytes: int) -> None:
        self._max_logprobs_bytes = max_logprobs_bytes
        self._stays: dict[str, Stay] = {}  # engine request id -> what it takes
        self._sequences: Counter[str] = Counter()  # by tenant; no entry is 0. So is the next
        self._logprobs_bytes: Counter[str] = Counter()
        self.num_sequences = 0
        self._total_logprobs_bytes = 0

    @property
    def request_ids(self) -> list[str]:
        """The requests that are inside."""
        return list(self._stays)

    def check(self, asked: Stay, max_sequences: int) -> None:
        """ApiError 429 if there is no room for `asked` now. `max_sequences`: places that there are."""
        own = self._sequences[asked.tenant]
        share = 1 / len(self._sequences.keys() | {asked.tenant})
        if not has_room(asked.num_sequences, self.num_sequences, own, max_sequences, share):
            raise overloaded(
                f"{self.num_sequences} sequences are under way ({own} of them yours), {asked.num_sequences} "
                f"more are asked for, and at most {max_sequences} may be (max_num_seqs + max_waiting)"
            )
        own, taken = self._logprobs_bytes[asked.tenant], self._total_logprobs_bytes
        if not has_room(asked.logprobs_bytes, taken, own, self._max_logprobs_bytes, share):
            raise overloaded(
                f"logprobs of {asked.logprobs_bytes} bytes, and answers under way may need {taken} ({own} of "
                f"them yours): at most {self._max_logprobs_bytes} (max_total_logprobs_bytes)"
            )

    def enter(self, request_id: str, stay: Stay) -> None:
        """Count a request until it leaves."""
        self._stays[request_id] = stay
        self._count(stay, 1)

    def leave(self, request_id: str) -> None:
        """The request has ended, however it did."""
        stay = self._stays.pop(request_id)
        self._count(stay, -1)
        for counter in (self._sequences, self._logprobs_bytes):
            if not counter[stay.tenant]:
                del counter[stay.tenant]

    def _count(self, stay: Stay, sign: int) -> None:
        self.num_sequences += sign * stay.num_sequences
        self._total_logprobs_bytes += sign * stay.logprobs_bytes
        self._sequences[stay.tenant] += sign * stay.num_sequences
        self._logprobs_bytes[stay.tenant] += sign * stay.logprobs_bytes
