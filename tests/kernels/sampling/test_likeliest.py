"""The most likely tokens and a token's rank: the native pass against a stable sort, on rows that are hard."""

from __future__ import annotations

import ctypes

import pytest
import torch
from quire.kernels.sampling.likeliest import launch_likeliest, likeliest_reference


def _make_rows(size: int) -> torch.Tensor:
    """Noise, few distinct values, all equal, rising, falling, zeros of both signs, denormals, infinities."""
    generator = torch.Generator().manual_seed(size)
    noise = torch.randn(size, generator=generator)
    few = torch.randint(4, (size,), generator=generator).float()
    rows = [noise, few, torch.full((size,), -3.5), torch.arange(size).float(), -torch.arange(size).float()]
    rows += [torch.where(few > 1, -0.0, 0.0), (few - 1) * 1e-45, torch.full((size,), -torch.inf)]
    two_huge = noise.clone()
    two_huge[[0, -1]] = 3e38
    most_forbidden = torch.where(noise > 2, noise, -torch.inf)
    endless = torch.where(few > 2, torch.inf, noise)
    return torch.stack([*rows, two_huge, most_forbidden, endless])


@pytest.mark.parametrize("size", [1, 15, 16, 17, 127, 128, 129, 2100, 20_011])
@pytest.mark.parametrize("count", [0, 1, 2, 5, 20, 300, 20_011])
def test_the_likeliest_tokens_come_in_the_order_of_a_stable_sort(
    library: ctypes.CDLL, size: int, count: int
) -> None:
    logits, count = _make_rows(size), min(count, size)
    tokens = torch.arange(len(logits)) * 977 % size
    ids, ranks = launch_likeliest(library, logits, tokens, count)
    expected_ids, expected_ranks = likeliest_reference(logits, tokens, count)
    assert torch.equal(ids, expected_ids)
    assert torch.equal(ranks, expected_ranks)


def test_rows_with_nan_cost_their_neighbours_nothing(library: ctypes.CDLL) -> None:
    logits = _make_rows(2100)
    tokens = torch.arange(len(logits))
    ids, ranks = launch_likeliest(library, logits, tokens, 20)
    logits[0], logits[3, 7], logits[5, 2099] = torch.nan, torch.nan, -torch.nan
    with_nan_ids, with_nan_ranks = launch_likeliest(library, logits, tokens, 20)
    others = [row for row in range(len(logits)) if row not in (0, 3, 5)]
    assert torch.equal(with_nan_ids[others], ids[others])
    assert torch.equal(with_nan_ranks[others], ranks[others])
    assert all(len(set(row)) == 20 and min(row) >= 0 and max(row) < 2100 for row in with_nan_ids.tolist())
