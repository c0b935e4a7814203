"""BeamScheduler: the beams of running requests: their part of a step, what follows its results, their blocks.

A round gives every beam its next tokens, in one step or in several, and ends when the last result has come:
then the best continuations become the beams. Who continues a beam first keeps its row and blocks; another one
shares its full blocks and copies the one that is not full. What a search knows survives a preemption; rows
and blocks do not: what all beams have in common is computed again, and then each beam's own tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ...ipc.protocol.step import RowFork, RowLogprobs
from ..kv.kv_cache_manager import KVCacheManager
from ..policies.policy import Policy
from .beam_search import Beam, read_candidates
from .request import NEVER, BeamGroup, Fork, Request, RequestStatus
from .request_queue import WaitingRequests
from .running_batch import RunningBatch
from .step import Step


class BeamScheduler:
    """A part of the scheduler. Requests without a `group` are none of its business."""

    def __init__(
        self,
        batch: RunningBatch,
        policy: Policy[WaitingRequests],
        size_chunk: Callable[[Step, Request, int], int],
        preempt: Callable[[Request], None],
    ) -> None:
        """`size_chunk`: how many of so many tokens a request may have in a step."""
        self._batch = batch
        self._policy = policy
        self._manager: KVCacheManager = batch.manager
        self._size_chunk = size_chunk
        self._preempt = preempt
        self._lacking: list[Request] = []  # whose beams are new, and have not all the blocks that they need

    # -- a step

    def allocate(self) -> None:
        """Give new beams their blocks, before a step is formed. If there are too few, the last running
        request is preempted for them, and the next one, up to the request itself. That one is charged for
        its tokens: it has computed them in vain, and will again before those who hold the blocks get on.
        """
        lacking, self._lacking = self._lacking, []
        for request in lacking:
            group, manager = request.group, self._manager
            assert group is not None
            while request.row is not None and manager.pool.num_free < sum(
                map(manager.count_missing, group.beams)
            ):
                last = self._batch.requests[-1]
                if last is request:
                    self._policy.note_beams(request, request.num_tokens)
                self._preempt(last)
            if num_missing := sum(map(manager.count_missing, group.beams)):  # none, if it was preempted
                self._policy.note_block(request, num_missing)
            for beam in group.beams:
                manager.extend(beam)

    def schedule(self, step: Step, running: Sequence[Request]) -> list[Request]:
        """Enter beams in the step; of the `running` requests, those that have none."""
        others: list[Request] = []
        for request in running:
            if request.group is None or not request.group.beams:
                others.append(request)
                continue
            # Beams are decodes too, beside which no long part of anything stands.
            longest = self._batch.config.max_prompt_tokens_beside_decodes
            step.long_prefill_budget = min(step.long_prefill_budget, longest)
            for beam in request.group.beams:
                if beam.num_computed_tokens < beam.num_tokens:
                    self._schedule_beam(step, request, request.group, beam)
        return others

    def _schedule_beam(self, step: Step, request: Request, group: BeamGroup, beam: Request) -> None:
        if not step.token_budget or len(step.rows) >= self._batch.max_step_rows:
            return
        num_tokens = beam.num_tokens - beam.num_computed_tokens
        if num_tokens > 1:
            num_tokens = self._size_chunk(step, request, num_tokens)
            step.long_prefill_budget -= min(num_tokens, step.long_prefill_budget)
        else:
            num_tokens = self._policy.limit_chunk(step, request, num_tokens)
        if num_tokens == 0:
            return
        assert beam.row is not None
        if (fork := group.forks.pop(beam.row, None)) is not None:
            self._enter_fork(step, beam, beam.row, fork)
            if beam.row != request.row and beam.row not in group.used_rows:
                group.used_rows.append(beam.row)
        step.token_budget -= num_tokens
        step.rows.append(beam.row)
        step.num_tokens.append(num_tokens)
        step.requests.append(request)
        beam.num_computed_tokens += num_tokens
        if beam.num_computed_tokens == beam.num_tokens:
            if request not in step.sampled[-group.num_rows :]:
                request.num_placeholders += 1
            step.sampled.append(request)
            step.sampled_rows.append(beam.row)
        if beam.num_computed_tokens >= beam.next_index_at:
            self._manager.index_full_blocks(beam, step.indexed_blocks)
        self._policy.note_beams(request, num_tokens, step)

    def _enter_fork(self, step: Step, beam: Request, row: int, fork: Fork) -> None:
        """Tell the worker how a beam's row comes to be. Until all beams have had their tokens nothing of what
        it takes from its source changes.
        """
        num_kept = fork.num_tokens // self._manager.block_size
        if fork.source_row == row:  # its own last block, if that is not full
            num_kept = self._manager.count_blocks(fork.num_tokens)
        if fork.copied_block is not None:
            step.block_copies.append((fork.copied_block, beam.block_ids[num_kept]))
        tail = beam.packed_tokens(fork.num_tokens, beam.num_tokens)
        step.forks.append(
            RowFork(row, fork.source_row, fork.num_tokens, tail, num_kept, beam.block_ids[num_kept:])
        )

    # -- a result

    def accept(self, step: Step, logprobs: Mapping[int, RowLogprobs]) -> tuple[list[Request], int]:
        """Take the results of beams; the requests whose search is over, and how many tokens were taken.

        What was computed for a request that has been preempted meanwhile is computed again.
        """
        done: list[Request] = []
        num_tokens = 0
        counted: set[Request] = set()
        for row, request in zip(step.sampled_rows, step.sampled, strict=True):
            group = request.group
            if group is None:
                continue
            if request not in counted:
                counted.add(request)
                request.num_placeholders -= 1
            if request.finish_reason is not None or request.status is not RequestStatus.RUNNING:
                continue
            found = logprobs[row].sample
            assert found is not None
            group.results[row] = read_candidates(found)
            num_tokens += 1
            if len(group.results) == max(1, len(group.beams)):
                self._end_round(request, group)
                if group.search.is_done:
                    done.append(request)
        return done, num_tokens

    def _end_round(self, request: Request, group: BeamGroup) -> None:
        results, group.results = group.results, {}
        search = group.search
        parents = group.beams or [self._make_first_beam(request)]
        if len(parents) < len(search.running):  # it was preempted: every beam comes from what all have
            self._fork(request, group, parents, [0] * len(search.running))
            return
        survivors = search.advance([results[parent.row or 0] for parent in parents])
        if not search.is_done:
            self._fork(request, group, parents, survivors)
        elif not group.beams:
            group.beams = parents

    def _make_first_beam(self, request: Request) -> Request:
        """The request as a beam, which has its row and its blocks."""
        beam = replace(request, group=None, block_hashes=request.block_hashes.copy())
        request.block_ids = []
        request.next_index_at = NEVER
        return beam

    def _fork(
        self, request: Request, group: BeamGroup, parents: Sequence[Request], survivors: Sequence[int]
    ) -> None:
        """Make beams of `search.running`, each of which continues one of the `parents`."""
        num_before = sum(len(parent.block_ids) for parent in parents)
        first_of = {parent: place for place, parent in reversed(list(enumerate(survivors)))}
        for place, parent in enumerate(parents):
            if place not in first_of:
                self._manager.free(parent)
                assert parent.row is not None
                group.free_rows.append(parent.row)
        group.beams = []
        for place, parent in enumerate(survivors):
            parent = parents[parent]
            is_first = first_of[survivors[place]] == place
            group.beams.append(parent if is_first else self._make_child(group, parent))
        for beam, running in zip(group.beams, group.search.running, strict=True):
            self._continue_beam(group, beam, running)
        num_after = sum(len(beam.block_ids) for beam in group.beams)
        self._policy.note_block(request, num_after - num_before)
        self._lacking.append(request)

    def _make_child(self, group: BeamGroup, parent: Request) -> Request:
        """One more beam that continues `parent`."""
        row = group.free_rows.pop()
        child = replace(parent, row=row)
        copied = self._manager.fork(parent, child)
        assert parent.row is not None
        group.forks[row] = Fork(parent.row, parent.num_computed_tokens, copied)
        return child

    def _continue_beam(self, group: BeamGroup, beam: Request, running: Beam) -> None:
        assert beam.row is not None
        if beam.row not in group.forks:
            group.forks[beam.row] = Fork(beam.row, beam.num_computed_tokens, None)
        beam.set_output(running.token_ids)
