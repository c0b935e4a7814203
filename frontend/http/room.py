"""Room: what the requests of one engine may take in one HTTP process, shared by those who ask.

Places for sequences are an engine's; bytes for the logprobs and vectors of answers, which are collected
until they are whole, are of the process, whatever engine makes them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...ipc.protocol.fair_share import has_room
from .errors import overloaded


@dataclass(frozen=True, slots=True)
class Stay:
    """What one request takes. answer_bytes: of logprobs or vectors."""

    tenant: str
    num_sequences: int
    answer_bytes: int = 0


@dataclass(slots=True)
class _Taken:
    """What one tenant's requests take together."""

    num_requests: int = 0
    amount: int = 0


_NOTHING = _Taken()


class Tally:
    """Who takes how much of one thing that tenants share. Knows those with requests inside, no others."""

    def __init__(self) -> None:
        self.amount = 0  # taken by all
        self._taken_by: dict[str, _Taken] = {}

    def find_amount(self, tenant: str) -> int:
        """What this tenant's requests take."""
        return self._taken_by.get(tenant, _NOTHING).amount

    def has_room(self, tenant: str, asked: int, bound: int) -> bool:
        """Whether `asked` may be taken by this tenant now, of `bound`: by ipc/protocol/fair_share.py."""
        share = 1 / (len(self._taken_by) + (tenant not in self._taken_by))
        return has_room(asked, self.amount, self.find_amount(tenant), bound, share)

    def enter(self, tenant: str, amount: int) -> None:
        """A request of this tenant's takes so much until it leaves."""
        taken = self._taken_by.setdefault(tenant, _Taken())
        taken.num_requests += 1
        taken.amount += amount
        self.amount += amount

    def leave(self, tenant: str, amount: int) -> None:
        """A request that has entered with this amount has ended."""
        taken = self._taken_by[tenant]
        taken.num_requests -= 1
        taken.amount -= amount
        self.amount -= amount
        if not taken.num_requests:
            del self._taken_by[tenant]


class Room:
    """Counts who takes how much. Raises ApiErrors with status 429."""

    def __init__(self, max_answer_bytes: int, answer_bytes: Tally) -> None:
        """`answer_bytes`: of the process, with those of other engines' requests."""
        self._max_answer_bytes = max_answer_bytes
        self._stays: dict[str, Stay] = {}  # engine request id -> what it takes
        self._sequences = Tally()
        self._answer_bytes = answer_bytes

    @property
    def num_sequences(self) -> int:
        """Sequences that are inside."""
        return self._sequences.amount

    @property
    def request_ids(self) -> list[str]:
        """The requests that are inside."""
        return list(self._stays)

    def check(self, asked: Stay, max_sequences: int) -> None:
        """ApiError 429 if there is no room for `asked` now. `max_sequences`: places that there are."""
        tenant, places, held = asked.tenant, self._sequences, self._answer_bytes
        if not places.has_room(tenant, asked.num_sequences, max_sequences):
            raise overloaded(
                f"{places.amount} sequences are under way ({places.find_amount(tenant)} of them yours), "
                f"{asked.num_sequences} more are asked for, and at most {max_sequences} may be "
                "(max_num_seqs + max_waiting)"
            )
        if not held.has_room(tenant, asked.answer_bytes, self._max_answer_bytes):
            raise overloaded(
                f"logprobs or vectors of {asked.answer_bytes} bytes, and answers under way may need "
                f"{held.amount} ({held.find_amount(tenant)} of them yours): at most {self._max_answer_bytes} "
                "(max_total_logprobs_bytes)"
            )

    def enter(self, request_id: str, stay: Stay) -> None:
        """Count a request until it leaves."""
        self._stays[request_id] = stay
        self._sequences.enter(stay.tenant, stay.num_sequences)
        self._answer_bytes.enter(stay.tenant, stay.answer_bytes)

    def leave(self, request_id: str) -> None:
        """The request has ended, however it did."""
        stay = self._stays.pop(request_id)
        self._sequences.leave(stay.tenant, stay.num_sequences)
        self._answer_bytes.leave(stay.tenant, stay.answer_bytes)
