"""Whole-number arithmetic of launch grids and blocks.

Triton has the same for kernels and hosts alike, but a call from the host takes 1.5 us, and a step of 28
layers without graphs makes 180.
"""

from __future__ import annotations


def ceil_div(count: int, size: int) -> int:
    """How many pieces of `size` hold `count`; neither is negative."""
    return (count + size - 1) // size


def next_power_of_2(count: int) -> int:
    """The least power of two that is not below `count`, which is at least 1."""
    return 1 << (count - 1).bit_length()
