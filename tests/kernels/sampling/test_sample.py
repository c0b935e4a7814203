"""Native sampling: token bitmasks as if logits were masked first, and what top-p keeps."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from quire.kernels.sampling.sample import launch_sample
from quire.kernels.sampling.token_bitmask import launch_token_bitmask

NUM_ROWS = 24


def _make_masks(size: int, generator: torch.Generator) -> torch.Tensor:
    """Dense, sparse, whole blocks of nothing and of everything, one token, and none."""
    masks = torch.randint(-(2**31), 2**31, (NUM_ROWS, -(-size // 32)), generator=generator).to(torch.int32)
    masks[0::6] &= masks[0::6].roll(1, 1) & masks[0::6].roll(2, 1) & masks[0::6].roll(3, 1)
    masks[1::6, : masks.shape[1] // 2] = 0
    masks[2::6, : masks.shape[1] // 2] = -1
    masks[3::6] = 0
    masks[3::6, masks.shape[1] // 2] = 1
    masks[4] = 0
    return masks


@pytest.mark.parametrize("size", [1, 33, 127, 128, 129, 2100, 20_011])
def test_a_mask_gives_the_tokens_of_logits_that_were_masked_first(library: ctypes.CDLL, size: int) -> None:
    generator, rng = torch.Generator().manual_seed(size), np.random.default_rng(size)
    logits = torch.randn(NUM_ROWS, size, generator=generator) * 4
    logits[5] = torch.nan
    logits[6, size // 2] = torch.nan
    logits[7, size // 3] = torch.inf
    logits[8] = -torch.inf
    masks = _make_masks(size, generator)
    rows = torch.arange(NUM_ROWS)[torch.arange(NUM_ROWS) % 7 != 3]
    addresses = np.zeros(NUM_ROWS, dtype=np.int64)
    addresses[rows] = masks.data_ptr() + rows.numpy() * masks.stride(0) * 4
    temperature = rng.choice([0.0, 0.5, 1.0, 3.0], NUM_ROWS).astype(np.float32)
    top_k = rng.choice([1, 5, 300, size], NUM_ROWS).clip(max=size)
    top_p, min_p = rng.choice([0.3, 0.9, 1.0], NUM_ROWS), rng.choice([0.0, 0.1], NUM_ROWS).astype(np.float32)
    columns = (temperature, top_k, top_p, min_p, rng.random(NUM_ROWS))
    tokens, top = launch_sample(library, logits, *columns, addresses)
    launch_token_bitmask(library, logits, masks[rows].contiguous(), rows)
    expected_tokens, expected_top = launch_sample(library, logits, *columns)
    assert torch.equal(tokens, expected_tokens)
    assert torch.equal(top.view(torch.int32), expected_top.view(torch.int32))


def _find_last_kept(logits: torch.Tensor, top_p: float) -> tuple[int, float]:
    """The last token that top-p keeps of falling logits, and how far, of all, its border is from top_p."""
    weights = torch.exp((logits - logits[0]).double()).numpy()
    shares = weights.cumsum() / weights.sum()
    is_last = np.append(logits[1:].numpy() < logits[:-1].numpy(), True)  # of its equals
    least = logits[np.searchsorted(shares, top_p)].item()
    return int(np.flatnonzero(is_last & (logits.numpy() == least))[0]), float(np.abs(shares - top_p).min())


@pytest.mark.parametrize("size", [1, 17, 128, 129, 2100, 20_011])
@pytest.mark.parametrize("step", [0.0, 0.25, 1e-6])
def test_top_p_keeps_the_fewest_tokens_that_reach_it_and_their_equals(
    library: ctypes.CDLL, size: int, step: float
) -> None:
    generator, rng = torch.Generator().manual_seed(size), np.random.default_rng(size)
    logits = torch.randn(size, generator=generator) * 3
    logits = (logits / step).round() * step if step else logits
    logits = logits.sort(descending=True).values
    asked = [1e-300, 1e-7, 0.5, *rng.random(60), 1 - 1e-3]
    found = [(top_p, *_find_last_kept(logits, top_p)) for top_p in asked]
    clear = [(top_p, last) for top_p, last, margin in found if margin > 1e-6]
    num_rows = len(clear)
    # The last quantile is the last token that is kept.
    tokens, _ = launch_sample(
        library,
        logits.expand(num_rows, -1).contiguous(),
        np.ones(num_rows, np.float32),
        np.full(num_rows, size),
        np.array([top_p for top_p, _ in clear]),
        np.zeros(num_rows, np.float32),
        np.full(num_rows, 1 - 2**-53),
    )
    assert tokens.tolist() == [last for _, last in clear]


def _make_shuffled(kind: str, size: int) -> torch.Tensor:
    noise = torch.randn(size, generator=torch.Generator().manual_seed(size))
    if kind == "peaked":  # a few tokens have nearly all, the rest nearly nothing
        return torch.where(noise > 2.5, noise * 6, noise * 2)
    if kind == "uneven":  # every other 16 tokens are rare: a sample of vectors misleads
        return noise * 0.5 - 3.0 * (torch.arange(size) // 16 % 2)
    return noise * {"flat": 0.01, "plain": 1.0, "steep": 3.0}[kind]


@pytest.mark.parametrize("size", [8192, 8193, 20_011, 151_936])
@pytest.mark.parametrize("kind", ["flat", "plain", "steep", "peaked", "uneven"])
def test_top_p_keeps_the_last_token_that_it_needs_and_not_the_next(
    library: ctypes.CDLL, kind: str, size: int
) -> None:
    logits = _make_shuffled(kind, size)
    order = logits.argsort(descending=True)
    weights = torch.exp((logits - logits.max()).double())[order].numpy()
    shares = weights.cumsum() / weights.sum()
    rows: list[torch.Tensor] = []
    columns: list[tuple[float, bool]] = []
    for top_p in (0.02, 0.3, 0.5, 0.8, 0.9, 0.95, 0.99, 0.999):
        place = int(np.searchsorted(shares, top_p))
        if np.abs(shares - top_p).min() < 2e-6 * (kind != "flat") or weights[place + 1] == weights[place]:
            continue
        for distance in (0, 1) if kind != "flat" else (-6, 6):  # neighbours are closer than rounding
            row = logits.clone()
            token = order[place + distance]
            row[[int(token), size - 1]] = row[[size - 1, int(token)]]
            rows.append(row)
            columns.append((top_p, distance <= 0))
    assert rows
    tokens, _ = launch_sample(
        library,
        torch.stack(rows),
        np.ones(len(rows), np.float32),
        np.full(len(rows), size),
        np.array([top_p for top_p, _ in columns]),
        np.zeros(len(rows), np.float32),
        np.full(len(rows), 1 - 2**-53),  # the last quantile is the last token that is kept
    )
    assert (tokens == size - 1).tolist() == [is_kept for _, is_kept in columns]


@pytest.mark.parametrize("count", [2, 64, 128, 2048])
def test_top_p_at_the_very_border_takes_no_more(library: ctypes.CDLL, count: int) -> None:
    logits = torch.full((1, 4096), -torch.inf)
    logits[0, :count] = 0.0  # equal weights: exact sums, half of them reach the target exactly
    logits[0, : count // 2] = np.log(2.0)
    weights = np.exp(logits[0].double().numpy() - np.log(2.0))
    share = weights[: count // 2].sum() / weights.sum()
    columns = [np.ones(1, np.float32), np.array([4096]), np.array([share - 1e-6]), np.zeros(1, np.float32)]
    for top_p, last in ((share - 1e-6, count // 2 - 1), (share + 1e-6, count - 1)):
        columns[2] = np.array([top_p])
        tokens, _ = launch_sample(library, logits, *columns, np.full(1, 1 - 2**-53))
        assert tokens.tolist() == [last]
