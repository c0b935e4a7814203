"""Which steps get a CUDA graph: sizes that are captured, and the one that a step is padded to.

A step of single tokens is computed by a graph of requests, any other by a graph of tokens that has room for
so many requests. A graph's work is bounded on the device, so what is padded costs launches of empty programs
and the matrix products of the tokens in excess. It knows numbers, no tensors.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

# Requests of one token: 1, 2, 4, then so far apart. Beyond 512 (vLLM's largest) the device's work hides the
# launches of a large model, not those of a small one.
_STEPS = ((8, 256, 8), (256, 512, 16), (512, 1024, 64))
# Tokens of mixed steps and prefills. Larger steps take the device longer than the host needs to launch them.
_MIXED_TOKENS = (32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
# Requests of a mixed step: splits of the keys follow from the bound, so there is one for a few.
_MIXED_REQUESTS = (8, 64)


@dataclass(frozen=True, slots=True)
class GraphSize:
    """What a graph has room for."""

    num_tokens: int
    num_requests: int
    is_mixed: bool  # some request may have more than one token


def make_ladder(max_num_seqs: int) -> list[int]:
    """Batch sizes that get a graph, rising up to `max_num_seqs`."""
    sizes = [1, 2, 4, *(size for step in _STEPS for size in range(*step))]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


class GraphSizes:
    """All sizes of an engine, and the choice of one."""

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int, *, captures_chunks: bool) -> None:
        """Without `captures_chunks` there are graphs for steps of single tokens only."""
        self._singles = make_ladder(max_num_seqs)
        tokens = [size for size in _MIXED_TOKENS if size < max_num_batched_tokens]
        if max_num_batched_tokens <= _MIXED_TOKENS[-1]:
            tokens.append(max_num_batched_tokens)
        self._tokens = tokens if captures_chunks else []
        self._requests = [*(count for count in _MIXED_REQUESTS if count < max_num_seqs), max_num_seqs]

    @property
    def all(self) -> list[GraphSize]:
        """Largest first: the others then fit into the memory that it has taken."""
        singles = [GraphSize(size, size, is_mixed=False) for size in self._singles]
        mixed = [
            GraphSize(size, count, is_mixed=True)
            for size in self._tokens
            for count in dict.fromkeys(min(count, size) for count in self._requests)
        ]
        return sorted(singles + mixed, key=lambda size: (size.num_tokens, size.num_requests), reverse=True)

    def choose(self, num_tokens: int, num_requests: int) -> GraphSize | None:
        """The smallest that holds such a step; None if none does."""
        if num_tokens == num_requests:
            size = _least(self._singles, num_requests)
            return None if size is None else GraphSize(size, size, is_mixed=False)
        size, count = _least(self._tokens, num_tokens), _least(self._requests, num_requests)
        if size is None or count is None:
            return None
        return GraphSize(size, min(count, size), is_mixed=True)


def _least(rising: list[int], number: int) -> int | None:
    place = bisect_left(rising, number)
    return rising[place] if place < len(rising) else None
