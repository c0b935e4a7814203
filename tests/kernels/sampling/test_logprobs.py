"""Logprobs, the most likely tokens and a token's rank: the native pass on rows that are hard."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
import torch
from quire.kernels.sampling.logprobs import launch_logprobs, logprobs_reference
from torch import Tensor


def _launch(
    library: ctypes.CDLL, logits: Tensor, tokens: Tensor, others: int | Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    addresses = np.array([row.data_ptr() for row in logits])
    return launch_logprobs(library, addresses, logits.shape[1], tokens, others)


def _make_rows(size: int) -> Tensor:
    """Noise, few distinct values, all equal, rising, falling, zeros of both signs, denormals, infinities, and
    one value that is a single step above all the others.
    """
    generator = torch.Generator().manual_seed(size)
    noise = torch.randn(size, generator=generator)
    few = torch.randint(4, (size,), generator=generator).float()
    rows = [noise, few, torch.full((size,), -3.5), torch.arange(size).float(), -torch.arange(size).float()]
    rows += [torch.where(few > 1, -0.0, 0.0), (few - 1) * 1e-45, torch.full((size,), -torch.inf)]
    two_huge = noise.clone()
    two_huge[[0, -1]] = 3e38
    most_forbidden = torch.where(noise > 2, noise, -torch.inf)
    endless = torch.where(few > 2, torch.inf, noise)
    steps = [torch.full((size,), value) for value in (1.0, -1.0)]
    for row in steps:
        row[size * 2 // 3] = torch.nextafter(row[0], torch.tensor(2.0))
    return torch.stack([*rows, two_huge, most_forbidden, *steps, endless])


@pytest.mark.parametrize("size", [1, 15, 16, 17, 127, 128, 129, 2100, 20_011])
@pytest.mark.parametrize("count", [0, 1, 2, 5, 20, 300, 20_011])
def test_the_likeliest_tokens_come_in_the_order_of_a_stable_sort(
    library: ctypes.CDLL, size: int, count: int
) -> None:
    logits, count = _make_rows(size), min(count, size)
    tokens = torch.arange(len(logits)) * 977 % size
    ids, logprobs, ranks = _launch(library, logits, tokens, count)
    expected_ids, expected, expected_ranks = logprobs_reference(logits, tokens, count)
    assert torch.equal(ids, expected_ids)
    assert torch.equal(ranks, expected_ranks)
    # Sums of 128 numbers in float32 are within 14 roundings, as lanes are added side by side, and each has 2
    # of the exponential; a logprob is rounded once.
    exact = slice(0, -1)  # the last row has an infinite logit
    torch.testing.assert_close(
        logprobs[exact], expected[exact], rtol=2**-23, atol=16 * 2**-24, equal_nan=True
    )


def test_those_asked_for_come_in_their_order_with_the_bits_of_the_likeliest(library: ctypes.CDLL) -> None:
    logits = _make_rows(20_011)[:-1]
    tokens = torch.arange(len(logits)) * 977 % 20_011
    ids, logprobs, ranks = _launch(library, logits, tokens, 40)
    others = ids[:, 1:].flip(1).long().contiguous()
    other_ids, other_logprobs, other_ranks = _launch(library, logits, tokens, others)
    assert torch.equal(other_ids, torch.cat((ids[:, :1], ids[:, 1:].flip(1)), 1))
    flipped = torch.cat((logprobs[:, :1], logprobs[:, 1:].flip(1)), 1)
    assert torch.equal(other_logprobs.view(torch.int32), flipped.view(torch.int32))
    assert torch.equal(other_ranks, ranks)


def test_rows_have_the_same_bits_in_any_company_and_on_any_threads(
    library: ctypes.CDLL, set_threads: Callable[[int], None]
) -> None:
    logits = torch.randn(9, 20_011, generator=torch.Generator().manual_seed(0)) * 4
    tokens = torch.arange(9)
    set_threads(3)
    together = _launch(library, logits, tokens, 20)
    set_threads(1)
    for row in range(9):
        alone = _launch(library, logits[row : row + 1].clone(), tokens[row : row + 1], 20)
        assert all(torch.equal(part[0], whole[row]) for part, whole in zip(alone, together, strict=True))


def test_rows_with_nan_cost_their_neighbours_nothing(library: ctypes.CDLL) -> None:
    logits = _make_rows(2100)
    tokens = torch.arange(len(logits))
    clean = _launch(library, logits, tokens, 20)
    logits[0], logits[3, 7], logits[5, 2099] = torch.nan, torch.nan, -torch.nan
    dirty = _launch(library, logits, tokens, 20)
    others = [row for row in range(len(logits)) if row not in (0, 3, 5)]
    for part, expected in zip(dirty, clean, strict=True):
        assert torch.equal(part[others].view(torch.int32), expected[others].view(torch.int32))
    assert dirty[1][[0, 3, 5]].isnan().all()
    likeliest = dirty[0][:, 1:].tolist()
    assert all(len(set(row)) == 20 and min(row) >= 0 and max(row) < 2100 for row in likeliest)
