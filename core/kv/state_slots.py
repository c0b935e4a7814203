"""StateSlots: who holds which slot for recurrent states, and which states can be found again.

A slot is a running request's, a snapshot, or free. A request's slot is never taken from it; snapshots give
way to requests and to newer snapshots, the least recently used first. It knows numbers and names; not
tokens or devices.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Snapshot:
    """The states after the first `num_tokens` tokens of a sequence, in a slot that no request computes in."""

    slot: int
    num_tokens: int = 0
    name: bytes | None = None  # what it is found by; None: these tokens are not all known, or nobody looks
    used_at: int = 0  # admissions before it was saved or found last
    is_kept: bool = True  # False: its slot is another's by now


class StateSlots:
    """`num_slots` slots. There are at least as many as rows, so a request never waits for one."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_admitted = 0  # requests that were given a slot
        # The last is taken next: slots that were never used take no memory.
        self._free = list(range(num_slots - 1, -1, -1))
        self._snapshots: OrderedDict[int, Snapshot] = OrderedDict()  # by slot, the least recently used first
        self._index: dict[bytes, Snapshot] = {}

    @property
    def num_used(self) -> int:
        """Slots of running requests."""
        return self.num_slots - len(self._free) - len(self._snapshots)

    @property
    def num_cached(self) -> int:
        """Snapshots that can be found."""
        return len(self._index)

    def find(self, name: bytes) -> Snapshot | None:
        """The snapshot of that name."""
        return self._index.get(name)

    def use(self, snapshot: Snapshot) -> None:
        """It is of use now: others give way before it."""
        snapshot.used_at = self.num_admitted
        self._snapshots.move_to_end(snapshot.slot)

    def take(self, source: Snapshot | None = None, *, moves: bool = False) -> int:
        """A slot for a request that enters, which is to go on from `source`.

        It is the source's own slot if it `moves` or no other can be had; the source is gone then. Else the
        caller copies its states.
        """
        self.num_admitted += 1
        if source is not None:
            self.use(source)
            if moves:
                self.drop(source)
        if not self._free:
            self.drop(next(iter(self._snapshots.values())))
        return self._free.pop()

    def release(self, slot: int) -> None:
        """A request gives its slot up."""
        self._free.append(slot)

    def keep(self, slot: int, num_tokens: int, name: bytes) -> Snapshot | None:
        """A request that leaves gives its slot up, which holds states to be found. None if they are known."""
        if (known := self._index.get(name)) is not None:
            self.use(known)
            self.release(slot)
            return None
        return self._add(slot, num_tokens, name)

    def save(
        self,
        num_tokens: int,
        name: bytes | None,
        unused_since: int,
        saved: list[Snapshot],
    ) -> Snapshot | None:
        """A new snapshot, in a free slot or that of the least recently used one; `saved` gets it.

        None if that was used after `unused_since` admissions or later, or is among `saved`, a step's.
        """
        if not self._free:
            oldest = next(iter(self._snapshots.values()), None)
            if oldest is None or oldest.used_at >= unused_since or oldest in saved:
                return None
            self.drop(oldest)
        snapshot = self._add(self._free.pop(), num_tokens, name)
        saved.append(snapshot)
        return snapshot

    def move(self, snapshot: Snapshot, num_tokens: int) -> None:
        """Its slot is written again, with states after more tokens. It has no name then."""
        self._forget_name(snapshot)
        snapshot.num_tokens = num_tokens
        self.use(snapshot)

    def name(self, snapshot: Snapshot, name: bytes) -> None:
        """Make it findable, unless another one of that name is there."""
        if self._index.setdefault(name, snapshot) is snapshot:
            snapshot.name = name

    def drop(self, snapshot: Snapshot) -> None:
        """Its states are of no use. No effect on one that is not kept any more."""
        if snapshot.is_kept:
            self._forget_name(snapshot)
            snapshot.is_kept = False
            del self._snapshots[snapshot.slot]
            self._free.append(snapshot.slot)

    def forget(self, name: bytes) -> None:
        """Drop the snapshot of that name, if there is one."""
        if (snapshot := self._index.get(name)) is not None:
            self.drop(snapshot)

    def forget_all(self) -> None:
        """Drop all snapshots."""
        for snapshot in list(self._snapshots.values()):
            self.drop(snapshot)

    def _add(self, slot: int, num_tokens: int, name: bytes | None) -> Snapshot:
        snapshot = self._snapshots[slot] = Snapshot(slot, num_tokens, used_at=self.num_admitted)
        if name is not None:
            self.name(snapshot, name)
        return snapshot

    def _forget_name(self, snapshot: Snapshot) -> None:
        if snapshot.name is not None:
            del self._index[snapshot.name]
            snapshot.name = None

    def check(self, held: Iterable[int]) -> list[str]:
        """The problems found, given the slots that requests hold."""
        owners = Counter([*held, *self._free, *self._snapshots])
        wrong = [slot for slot in range(self.num_slots) if owners[slot] != 1]
        problems = [f"state slot {slot} has {owners[slot]} owners" for slot in wrong]
        if owners.total() != self.num_slots:
            problems.append(f"{owners.total()} owners of {self.num_slots} state slots")
        for slot, snapshot in self._snapshots.items():
            if snapshot.slot != slot or not snapshot.is_kept:
                problems.append(f"state slot {slot} has a snapshot that is not there")
        named = {
            snapshot.name: snapshot for snapshot in self._snapshots.values() if snapshot.name is not None
        }
        if named != self._index:
            problems.append(f"{len(named)} named states, {len(self._index)} in the index")
        return problems
