"""UtilityCalls: what clients ask about the engine, answered no faster than the step loop can bear.

A look walks what is live: 0.5 ms for a snapshot, 20 ms for a check of 10,000 requests. So calls of a method
wait until it is due, then share one answer that is newer than each of them: a round takes one call of each
client. Whoever asks now and then is answered at once; whoever floods waits, and nobody's steps do. What an
answer holds is `call_utility`'s (core/stats/engine_facts.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from ...ipc.messages import UtilityCall, UtilityMethod, UtilityResult

_REST = 20  # times the cost of a round, for each answer in it: looks take at most 5 % of the core's time
MAX_WAITING_CALLS = 1024  # of a client and a method; whoever asks more often gets no answer to the rest

WaitingCalls = dict[bytes, deque[int]]  # client -> its call ids


class UtilityCalls:
    """Calls that wait, by method and client. `clock` is monotonic."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: dict[UtilityMethod, WaitingCalls] = {}  # none is empty
        self._due_at: dict[UtilityMethod, float] = {}

    def add(self, client: bytes, call: UtilityCall) -> None:
        """Let a call wait for its round; one beyond MAX_WAITING_CALLS is dropped."""
        ids = self._waiting.setdefault(call.method, {}).setdefault(client, deque())
        if len(ids) < MAX_WAITING_CALLS:
            ids.append(call.call_id)

    def forget(self, client: bytes) -> None:
        """Drop the calls of a client that is gone."""
        for method, calls in list(self._waiting.items()):
            calls.pop(client, None)
            if not calls:
                del self._waiting[method]

    @property
    def next_at(self) -> float | None:
        """When a round is due, None if nothing waits."""
        if not self._waiting:
            return None
        return min(self._due_at.get(method, 0.0) for method in self._waiting)

    def answer(self, ask: Callable[[UtilityCall], UtilityResult]) -> list[tuple[bytes, UtilityResult]]:
        """The answers of every round that is due: (client, result). `ask` is called once a method."""
        answers: list[tuple[bytes, UtilityResult]] = []
        for method in list(self._waiting):
            began = self._clock()
            if self._due_at.get(method, 0.0) > began:
                continue
            result = ask(UtilityCall(0, method))
            calls = self._waiting.pop(method)
            answers += [
                (client, msgspec.structs.replace(result, call_id=ids.popleft()))
                for client, ids in calls.items()
            ]
            ended = self._clock()
            self._due_at[method] = ended + _REST * (ended - began) * len(calls)
            if left := {client: ids for client, ids in calls.items() if ids}:
                self._waiting[method] = left
        return answers
