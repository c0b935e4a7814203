"""RepetitionDetector: whether an output ends in a pattern that it repeats, told from its tokens alone."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from ...ipc.repetition_detection import RepetitionDetectionParams


class RepetitionDetector:
    """Follows one output. A token costs in proportion to max_pattern_size, however long patterns repeat.

    An output ends in a pattern of p tokens c times if its last p * (c - 1) tokens equal those p places
    before them. So it is enough to know, for each p, how many of the last tokens do.
    """

    __slots__ = ("_max_size", "_min_size", "_num_equal", "_num_repeats")

    def __init__(self, params: RepetitionDetectionParams) -> None:
        self._min_size = params.min_pattern_size
        self._max_size = params.max_pattern_size
        self._num_repeats = params.min_count - 1
        self._num_equal: dict[int, int] = {}  # p -> the last so many tokens equal those p before; 0: no entry

    @property
    def is_repeating(self) -> bool:
        """The output ends in a pattern, often enough."""
        return any(count >= size * self._num_repeats for size, count in self._num_equal.items())

    def append(self, output: array[int]) -> None:
        """The last token of `output` is new."""
        self._advance(output[-1 - self._max_size :])

    def feed(self, output: Sequence[int]) -> None:
        """Begin with an output that is there already."""
        self._num_equal = {}
        # Counts that begin further back are large enough by the end, all the same.
        first = max(0, len(output) - self._max_size * self._num_repeats)
        for end in range(first, len(output)):
            self._advance(output[max(0, end - self._max_size) : end + 1])

    def _advance(self, tail: Sequence[int]) -> None:
        """The last of `tail` is new; the others are the max_pattern_size tokens before it, or all."""
        last, get = tail[-1], self._num_equal.get
        before = tail[-1 - self._min_size :: -1] if len(tail) > self._min_size else ()
        self._num_equal = {
            size: get(size, 0) + 1 for size, token in enumerate(before, self._min_size) if token == last
        }
