"""Native sampling with token bitmasks: the same bits as of logits that were masked first."""

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
