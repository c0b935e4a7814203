"""RepetitionDetector: whether an output ends in a pattern that it repeats, told from its tokens alone."""

from __future__ import annotations

from array import array

from ...ipc.params.repetition_detection import RepetitionDetectionParams


class RepetitionDetector:
    """Follows one output. A token costs in proportion to max_pattern_size, however long patterns repeat.

    An output ends in a pattern of p tokens c times if its last p * (c - 1) tokens equal those p places
    before them. So it is enough to know, for each p, how many of the last tokens do.
    """

    __slots__ = ("_max_size", "_min_size", "_num_equal", "_num_repeats")

    def __init__(self, params: RepetitionDetectionParams, output: array[int]) -> None:
        """`output`: what there is of it already."""
        self._min_size = params.min_pattern_size
        self._max_size = params.max_pattern_size
        self._num_repeats = params.min_count - 1
        # p -> the last so many tokens equal those p before; no entry: 0
        self._num_equal = {
            size: count
            for size in range(self._min_size, self._max_size + 1)
            if (count := _count_equal(output, size, size * self._num_repeats))
        }

    def append(self, output: array[int]) -> None:
        """The last token of `output` is new."""
        last, known = output[-1], self._num_equal
        before = output[-1 - self._max_size : -self._min_size]
        if last not in before:  # as most are: a search in C
            self._num_equal = {}
        else:
            before.reverse()
            self._num_equal = {
                size: known.get(size, 0) + 1
                for size, token in enumerate(before, self._min_size)
                if token == last
            }

    @property
    def is_repeating(self) -> bool:
        """The output ends in a pattern, often enough."""
        repeats = self._num_repeats
        return any(count >= size * repeats for size, count in self._num_equal.items())


def _count_equal(output: array[int], size: int, most: int) -> int:
    """How many of the last tokens, up to `most`, equal those `size` places before them."""
    low, high = 0, min(most, len(output) - size)  # bisected: slices are compared in C
    if high < 1 or output[-1] != output[-1 - size]:
        return 0
    while low < high:
        count = (low + high + 1) // 2
        if output[-count:] == output[-count - size : -size]:
            low = count
        else:
            high = count - 1
    return low
