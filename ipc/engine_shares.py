"""Which cores each of several engines on one machine computes on. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from .rank_cores import Core, plan_ranks


def find_share(cores: Sequence[Core], rank: int, size: int) -> list[Core]:
    """The cores of engine `rank` of `size`: as many as every other's, side by side and nobody else's.

    Where there are fewer cores than engines each has one, which it shares.
    """
    plan = plan_ranks(list(cores), size)
    return [cores[rank % len(cores)]] if plan is None else plan[rank]


def describe_shares(cores: Sequence[Core], size: int) -> str:
    """One line for people: '2 engines with 4 threads each (cores 0-3, 4-7)'."""
    shares = [find_share(cores, rank, size) for rank in range(size)]
    places = ", ".join(_describe(share) for share in shares)
    num_threads = len(shares[0])
    return f"{size} engines with {num_threads} thread{'s' * (num_threads > 1)} each (cores {places})"


def _describe(share: Sequence[Core]) -> str:
    """'0-3' of neighbours, else '0+2+4'."""
    numbers = [core.processor for core in share]
    first, last = numbers[0], numbers[-1]
    if len(numbers) > 1 and numbers == list(range(first, last + 1)):
        return f"{first}-{last}"
    return "+".join(map(str, numbers))
