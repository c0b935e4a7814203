"""Counter-based noise: one number in [0, 1) per (seed, output position), with no state between steps.

The generator is SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) read at an arbitrary place: the seed is mixed
once to choose a stream, the position counts within it. Neighbours in either argument are independent.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
_TO_UNIT = 2.0**-53


def mix64(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finalizer, a bijection of 64-bit words: every input bit reaches every output bit."""
    words = (words ^ (words >> np.uint64(30))) * _MULTIPLIER_1
    words = (words ^ (words >> np.uint64(27))) * _MULTIPLIER_2
    return words ^ (words >> np.uint64(31))


def uniform_noise(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """float64 [S] in [0, 1) with 53 random bits for each pair; positions count from 0."""
    streams = mix64(seeds + _GOLDEN)
    words = mix64(streams + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (words >> np.uint64(11)).astype(np.float64) * _TO_UNIT
