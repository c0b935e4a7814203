"""PriorityPolicy: the least priority value first, then by arrival.

A waiting request that lacks a row or blocks preempts running ones of a strictly worse value, if that makes
enough room.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...ipc.protocol.messages import EngineCoreRequest
from ..scheduling.request import Request
from .fcfs import FcfsPolicy


class PriorityPolicy(FcfsPolicy):
    """The policy `priority`."""

    def rank(self, request: EngineCoreRequest) -> int:
        """The value that the user gave."""
        return request.options.priority

    def choose_victims(self) -> Iterator[Request]:
        """Running requests of a worse value, the last one first, while the first waiting one lacks room."""
        batch = self.batch
        urgent = self.waiting.peek()
        if urgent is None or urgent.num_placeholders or not batch.requests:
            return
        if batch.requests[-1].rank <= urgent.rank:
            return
        manager = batch.manager
        hit = manager.find_prefix(urgent)
        worse = [request for request in batch.requests if request.rank > urgent.rank]
        # At best all their blocks come free; if even that is too little, let them run.
        num_blocks = sum(request.num_blocks for request in worse)
        num_staying = (batch.num_used_rows - len(worse)) * manager.num_groups
        if manager.count_taken(urgent, hit) + num_staying > manager.pool.num_free + num_blocks:
            return
        while worse and (not batch.free_rows or batch.lacks_blocks(urgent, hit)):
            yield worse.pop()
