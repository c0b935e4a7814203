"""StepLimits: how much a step may hold after the device's memory did not suffice for one. Pure.

Such a step is halved and run again; nobody fails for it. After some steps that went well the limits are
doubled. A shortage after that doubles how many it takes: a batch that never fits is tried ever more rarely.
"""

from __future__ import annotations

FIRST_PATIENCE, MAX_PATIENCE = 16, 1024  # steps that go well before the limits are doubled
ATTEMPTS_AT_FLOOR = 2  # of a step that cannot be made smaller


class StepLimits:
    """The present limits, at first the configured ones. Rows are never more than tokens."""

    def __init__(self, max_tokens: int, max_rows: int, *, can_split: bool) -> None:
        """`can_split`: whether a prompt may be computed in parts; if not, only rows are limited."""
        self._most_tokens, self._most_rows = max_tokens, max_rows
        self._can_split = can_split
        self.max_tokens, self.max_rows = max_tokens, max_rows
        self._patience = FIRST_PATIENCE
        self._has_grown = False  # since the last shortage
        self._num_good_steps = 0
        self._num_failures_at_floor = 0

    def shrink(self, num_tokens: int, num_rows: int) -> bool:
        """A step of this size ran out of memory. True: run what was in it again, within the new limits.

        False: it held one request, in its smallest part, and not for the first time.
        """
        self._num_good_steps = 0
        if self._has_grown:
            self._patience = min(2 * self._patience, MAX_PATIENCE)
            self._has_grown = False
        if num_rows == 1 and (num_tokens == 1 or not self._can_split):
            self._num_failures_at_floor += 1
            self.max_rows = 1
            return self._num_failures_at_floor < ATTEMPTS_AT_FLOOR
        if self._can_split:
            self.max_tokens = max(1, min(self.max_tokens, num_tokens) // 2)
        num_rows_now = max(1, num_rows // 2) if num_rows > 1 else self.max_rows
        self.max_rows = min(self.max_rows, num_rows_now, self.max_tokens)
        return True

    @property
    def is_at_floor(self) -> bool:
        """Whether a step failed that cannot be made smaller, and nobody has ended for it."""
        return self._num_failures_at_floor > 0

    def forget_failures(self) -> None:
        """The request that was alone in its smallest step has got further, or has ended."""
        self._num_failures_at_floor = 0

    def note_success(self) -> bool:
        """A step went well. True when the limits have grown."""
        is_full = self.max_tokens == self._most_tokens and self.max_rows == self._most_rows
        if is_full and self._patience == FIRST_PATIENCE:
            return False
        self._num_good_steps += 1
        if self._num_good_steps < self._patience:
            return False
        self._num_good_steps = 0
        if is_full:
            self._patience, self._has_grown = FIRST_PATIENCE, False
            return False
        self._has_grown = True
        self.max_tokens = min(2 * self.max_tokens, self._most_tokens)
        is_full = self.max_tokens == self._most_tokens
        self.max_rows = min(2 * self.max_rows, self._most_rows if is_full else self.max_tokens)
        return True
