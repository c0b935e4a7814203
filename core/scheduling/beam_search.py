"""BeamSearchState: which continuations survive a round of beam search, and when a search is over. Pure.

It knows tokens and logprobs; not requests, rows or blocks. Scores are float32, in the order of operations of
transformers' `generate(num_beams=...)`, so that ties and close scores fall as they do there.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

from ...ipc.params.beam_search import BeamSearch
from ...ipc.protocol.messages import BeamHypothesis, FinishReason, LogprobsBlock


class Candidates(NamedTuple):
    """The likeliest next tokens of a beam, best first."""

    token_ids: array[int]
    logprobs: array[float]


def read_candidates(found: LogprobsBlock) -> Candidates:
    """The likeliest tokens at one position, without entry 0: what was sampled there is nobody's business."""
    return Candidates(array("i", found.token_ids)[1:], array("f", found.logprobs)[1:])


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
        self._num_kept = search.count_candidates(len(eos_token_ids))

    def advance(self, candidates: Sequence[Candidates]) -> list[int]:
        """Take the likeliest next tokens of each running beam, best first: `search.count_candidates` of them.

        `running` is then made of those that survive; returns which former beam each of them continues.
        """
        self.num_rounds += 1
        is_last = self.num_rounds >= self._max_tokens
        best = self._find_best(candidates)
        width = self.search.width
        for one in best[:width]:
            if one.token_id in self._eos_token_ids:
                self._finish(one, FinishReason.STOP)
            elif is_last:
                self._finish(one, FinishReason.LENGTH)
        survivors = [one for one in best if one.token_id not in self._eos_token_ids][:width]
        parents = [one.parent for one in survivors]
        self.running = [self._extend(one) for one in survivors]
        self.is_done = is_last or self._is_settled()
        return parents

    def to_hypotheses(self) -> list[BeamHypothesis]:
        """What has ended, best first, for the client."""
        return [
            BeamHypothesis(
                LogprobsBlock(
                    len(one.beam.token_ids),
                    1,
                    one.beam.token_ids.tobytes(),
                    one.beam.logprobs.tobytes(),
                    one.beam.ranks.tobytes(),
                ),
                one.beam.cumulative_logprob,
                one.score,
                one.finish_reason,
            )
            for one in self.finished
        ]

    def find_common_prefix(self) -> array[int]:
        """The tokens with which the output of every running beam begins."""
        first = self.running[0].token_ids
        length = len(first)
        for beam in self.running[1:]:
            own = beam.token_ids
            length = next((i for i in range(min(length, len(own))) if own[i] != first[i]), length)
        return first[:length]

    def _find_best(self, candidates: Sequence[Candidates]) -> list[_Continuation]:
        """The best continuations of all beams; equal ones by beam, then by token id.

        Beams are merged, each best first, and read no further than is needed: of 128 beams with 256
        candidates each some 400.
        """
        sums = [
            _add_float32(beam.cumulative_logprob, own.logprobs)
            for beam, own in zip(self.running, candidates, strict=True)
        ]
        heap = [(-next(of_beam), parent, 0) for parent, of_beam in enumerate(sums)]
        heapify(heap)
        found: list[_Continuation] = []
        while heap:
            negative, parent, place = heap[0]
            if len(found) >= self._num_kept and -negative < found[-1].cumulative_logprob:
                break  # equal ones were all read, which may be in another order
            own = candidates[parent]
            found.append(
                _Continuation(-negative, parent, place + 1, own.token_ids[place], own.logprobs[place])
            )
            following = next(sums[parent], None)
            if following is None:
                heappop(heap)
            else:
                heapreplace(heap, (-following, parent, place + 1))
        found.sort(key=lambda one: (-one.cumulative_logprob, one.parent, one.token_id))
        return found[: self._num_kept]

    def _extend(self, one: _Continuation) -> Beam:
        parent = self.running[one.parent]
        return Beam(
            parent.token_ids + array("i", (one.token_id,)),
            parent.logprobs + array("f", (one.logprob,)),
            parent.ranks + array("i", (one.rank,)),
            one.cumulative_logprob,
        )

    def _finish(self, one: _Continuation, reason: FinishReason) -> None:
        score = self._score(one.cumulative_logprob, self.num_rounds)
        self.finished.append(Hypothesis(self._extend(one), score, reason))
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


def _add_float32(total: float, logprobs: array[float]) -> Iterator[float]:
    """`total` and each logprob, as float32 adds them."""
    return (array("f", (total + logprob,))[0] for logprob in logprobs)
