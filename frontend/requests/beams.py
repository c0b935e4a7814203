"""BeamSearchState: which continuations survive a round of beam search, and when a search is over. Pure.

It knows tokens and logprobs, and the request with which a search begins. Scores are float32, in the order of
operations of transformers' `generate(num_beams=...)`, so that ties and close scores fall as they do there.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

import msgspec

from ...ipc.params.beam_search import BeamSearch
from ...ipc.protocol.messages import EngineCoreRequest, FinishReason, LogprobsBlock
from ...ipc.protocol.token_ids import count_token_ids
from ...ipc.protocol.token_lists import NO_LISTS, drop_packed


class Candidates(NamedTuple):
    """The likeliest next tokens of a beam, best first."""

    token_ids: array[int]
    logprobs: array[float]


def read_candidates(block: LogprobsBlock) -> Candidates:
    """The likeliest tokens at one position, without entry 0, the token that was sampled there."""
    return Candidates(array("i", block.token_ids)[1:], array("f", block.logprobs)[1:])


@dataclass(slots=True, eq=False)
class Beam:
    """A sequence that goes on, or has ended: its output with each token's logprob and rank."""

    token_ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    ranks: array[int] = field(default_factory=lambda: array("i"))
    cumulative_logprob: float = 0.0


@dataclass(slots=True, eq=False)
class Hypothesis:
    """A sequence that has ended."""

    beam: Beam
    score: float
    finish_reason: FinishReason


class _Continuation(NamedTuple):
    cumulative_logprob: float
    parent: int
    rank: int
    token_id: int
    logprob: float


class BeamSearchState:
    """One search: `running` beams and `finished` hypotheses, each best first and at most `width`."""

    def __init__(self, search: BeamSearch, eos_token_ids: Collection[int], max_tokens: int) -> None:
        """max_tokens: of the output; a beam that has as many ends."""
        self.search = search
        self.running: list[Beam] = [Beam()]
        self.finished: list[Hypothesis] = []
        self.num_rounds = 0
        self.is_done = False
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_tokens = max_tokens
        self.num_candidates = search.count_candidates(len(eos_token_ids))

    def advance(self, candidates: Sequence[Candidates]) -> None:
        """Take the `num_candidates` likeliest next tokens of each running beam; those that survive run on."""
        self.num_rounds += 1
        is_last = self.num_rounds >= self._max_tokens
        best = self._find_best(candidates)
        width = self.search.width
        for continuation in best[:width]:
            if continuation.token_id in self._eos_token_ids:
                self._finish(continuation, FinishReason.STOP)
            elif is_last:
                self._finish(continuation, FinishReason.LENGTH)
        survivors = [candidate for candidate in best if candidate.token_id not in self._eos_token_ids][:width]
        self.running = [self._extend(survivor) for survivor in survivors]
        self.is_done = is_last or self._is_settled()

    def _find_best(self, candidates: Sequence[Candidates]) -> list[_Continuation]:
        """The best continuations of all beams; equal ones by beam, then by token id.

        Beams are merged, each best first, and read no further than is needed: of 128 beams with 256
        candidates each some 400.
        """
        sums = [
            _add_float32(beam.cumulative_logprob, following.logprobs)
            for beam, following in zip(self.running, candidates, strict=True)
        ]
        heap = [(-next(of_beam), parent, 0) for parent, of_beam in enumerate(sums)]
        heapify(heap)
        best: list[_Continuation] = []
        while heap:
            negative, parent, place = heap[0]
            if len(best) >= self.num_candidates and -negative < best[-1].cumulative_logprob:
                break  # equal ones were all read, which may be in another order
            following = candidates[parent]
            best.append(
                _Continuation(
                    -negative, parent, place + 1, following.token_ids[place], following.logprobs[place]
                )
            )
            next_sum = next(sums[parent], None)
            if next_sum is None:
                heappop(heap)
            else:
                heapreplace(heap, (-next_sum, parent, place + 1))
        best.sort(key=lambda each: (-each.cumulative_logprob, each.parent, each.token_id))
        return best[: self.num_candidates]

    def _extend(self, continuation: _Continuation) -> Beam:
        parent = self.running[continuation.parent]
        return Beam(
            parent.token_ids + array("i", (continuation.token_id,)),
            parent.logprobs + array("f", (continuation.logprob,)),
            parent.ranks + array("i", (continuation.rank,)),
            continuation.cumulative_logprob,
        )

    def _finish(self, continuation: _Continuation, reason: FinishReason) -> None:
        score = self._score(continuation.cumulative_logprob, self.num_rounds)
        self.finished.append(Hypothesis(self._extend(continuation), score, reason))
        self.finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self.finished[self.search.width :]

    def _score(self, cumulative_logprob: float, num_tokens: int) -> float:
        (divisor,) = array("f", (num_tokens**self.search.length_penalty,))
        return array("f", (cumulative_logprob / divisor,))[0]

    def _is_settled(self) -> bool:
        """True when what has ended is not expected to be improved on."""
        if len(self.finished) < self.search.width:
            return False
        if self.search.early_stopping is True:
            return True
        is_patient = self.search.early_stopping == "never" and self.search.length_penalty > 0
        best = self._score(
            self.running[0].cumulative_logprob, self._max_tokens if is_patient else self.num_rounds
        )
        return best <= self.finished[-1].score


def begin_search(
    request: EngineCoreRequest, search: BeamSearch, max_model_len: int
) -> tuple[BeamSearchState, EngineCoreRequest]:
    """A search that ends as `request` would, and the request of its first round."""
    params = copy.copy(request.sampling_params)
    room = max_model_len - count_token_ids(request.prompt_token_ids)
    max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    state = BeamSearchState(search, request.eos_token_ids, max_tokens)
    # Beams are ranked by the model's own logprobs. An end of sequence ends a beam, which the search sees.
    params.n, params.seed, params.temperature, params.max_tokens = 1, 0, 0.0, 1
    params.logprobs = state.num_candidates
    drop_packed(params)
    fields = {name: getattr(request, name) for name in EngineCoreRequest.__struct_fields__}
    fields |= {"sampling_params": params, "eos_token_ids": [], "token_lists": NO_LISTS}
    fields |= {"purpose": "beam_search", "num_sequences": search.width, "is_continued": True}
    # By this name the search is shown, and can be aborted, in every round.
    names = [*request.options.names, request.request_id]
    fields["options"] = msgspec.structs.replace(request.options, names=names)
    return state, EngineCoreRequest(**fields)


def _add_float32(total: float, logprobs: array[float]) -> Iterator[float]:
    """`total` and each logprob, as float32 adds them."""
    return (array("f", (total + logprob,))[0] for logprob in logprobs)
