"""Room: what the requests of one HTTP process may take together, shared by those who ask (ipc/fair_share.py).

Places for sequences, and bytes for the logprobs of answers, which are collected until they are whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...ipc.fair_share import has_room
from .errors import overloaded


@dataclass(frozen=True, slots=True)
class Stay:
    """What one engine request takes."""

    tenant: str
    num_sequences: int
    logprobs_bytes: int = 0


@dataclass(slots=True)
class _Taken:
    """What requests take together."""

    num_sequences: int = 0
    logprobs_bytes: int = 0

    def count(self, stay: Stay, sign: int) -> None:
        self.num_sequences += sign * stay.num_sequences
        self.logprobs_bytes += sign * stay.logprobs_bytes


_NOTHING = _Taken()


class Room:
    """Counts who takes how much. Raises ApiErrors with status 429."""

    def __init__(self, max_logprobs_bytes: int) -> None:
        self._max_logprobs_bytes = max_logprobs_bytes
        self._stays: dict[str, Stay] = {}  # engine request id -> what it takes
        self._taken_by: dict[str, _Taken] = {}  # by tenant, of those with requests inside
        self._taken = _Taken()  # by all

    @property
    def num_sequences(self) -> int:
        """Sequences that are inside."""
        return self._taken.num_sequences

    @property
    def request_ids(self) -> list[str]:
        """The requests that are inside."""
        return list(self._stays)

    def check(self, asked: Stay, max_sequences: int) -> None:
        """ApiError 429 if there is no room for `asked` now. `max_sequences`: places that there are."""
        all_of, own = self._taken, self._taken_by.get(asked.tenant, _NOTHING)
        share = 1 / (len(self._taken_by) + (own is _NOTHING))
        if not has_room(asked.num_sequences, all_of.num_sequences, own.num_sequences, max_sequences, share):
            raise overloaded(
                f"{all_of.num_sequences} sequences are under way ({own.num_sequences} of them yours), "
                f"{asked.num_sequences} more are asked for, and at most {max_sequences} may be "
                "(max_num_seqs + max_waiting)"
            )
        max_bytes, taken_bytes = self._max_logprobs_bytes, all_of.logprobs_bytes
        if not has_room(asked.logprobs_bytes, taken_bytes, own.logprobs_bytes, max_bytes, share):
            raise overloaded(
                f"logprobs of {asked.logprobs_bytes} bytes, and answers under way may need {taken_bytes} "
                f"({own.logprobs_bytes} of them yours): at most {max_bytes} (max_total_logprobs_bytes)"
            )

    def enter(self, request_id: str, stay: Stay) -> None:
        """Count a request until it leaves."""
        self._stays[request_id] = stay
        self._taken.count(stay, 1)
        self._taken_by.setdefault(stay.tenant, _Taken()).count(stay, 1)

    def leave(self, request_id: str) -> None:
        """The request has ended, however it did."""
        stay = self._stays.pop(request_id)
        self._taken.count(stay, -1)
        own = self._taken_by[stay.tenant]
        own.count(stay, -1)
        if not own.num_sequences:
            del self._taken_by[stay.tenant]
