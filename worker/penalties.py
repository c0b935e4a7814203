"""Penalties of one row: which tokens it has seen and how often it wrote them, kept up token by token.

The prompt counts for repetition only, the output for all three penalties (OpenAI's and CTRL's definitions).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class TokenPenalties:
    """The distinct tokens of a row with their number of occurrences in the output.

    A dict finds a token's place, two arrays hold the ids and counts, so that a step costs one append and the
    sampler reads arrays whose length is the number of distinct tokens.
    """

    def __init__(
        self,
        prompt: NDArray[np.int32],
        output: NDArray[np.int32],
        repetition: float,
        frequency: float,
        presence: float,
    ) -> None:
        self.repetition = repetition
        self.frequency = frequency
        self.presence = presence
        # Without a repetition penalty the prompt has no say, and its tokens need no place.
        seen: list[int] = np.unique(prompt).tolist() if repetition != 1.0 else []
        self._place_of = {token: place for place, token in enumerate(seen)}
        self._ids = np.array(seen, dtype=np.int64)
        self._counts = np.zeros(len(seen), dtype=np.float32)
        for token in output.tolist():
            self.append(token)

    def append(self, token: int) -> None:
        """The row has generated `token`."""
        place = self._place_of.setdefault(token, len(self._place_of))
        if place == len(self._ids):
            room = max(64, len(self._ids))
            self._ids = np.concatenate((self._ids, np.zeros(room, dtype=np.int64)))
            self._counts = np.concatenate((self._counts, np.zeros(room, dtype=np.float32)))
        self._ids[place] = token
        self._counts[place] += 1.0

    @property
    def ids(self) -> NDArray[np.int64]:
        """The distinct tokens seen."""
        return self._ids[: len(self._place_of)]

    @property
    def counts(self) -> NDArray[np.float32]:
        """How often the output holds each of `ids`; 0 for tokens of the prompt alone."""
        return self._counts[: len(self._place_of)]
