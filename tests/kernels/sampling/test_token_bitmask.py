"""The native token bitmask against its reference: exact, whatever the row's last word holds."""

from __future__ import annotations

import ctypes

import pytest
import torch
from quire.kernels.sampling.token_bitmask import apply_token_bitmask_reference, launch_token_bitmask


@pytest.mark.parametrize(("num_rows", "size"), [(3, 1), (3, 31), (3, 32), (3, 33), (3, 1000), (32, 20_000)])
def test_masked_rows_keep_what_their_bits_allow_and_others_all(
    library: ctypes.CDLL, num_rows: int, size: int
) -> None:
    generator = torch.Generator().manual_seed(size)
    num_words = -(-size // 32)
    bitmask = torch.randint(-(2**31), 2**31, (num_rows - 1, num_words), generator=generator).to(torch.int32)
    bitmask[0, ::2] = 0  # words of one bit alone are taken a shorter way
    bitmask[1, ::2] = -1
    rows = torch.randperm(num_rows, generator=generator)[:-1]
    logits = torch.randn(num_rows, size, generator=generator)
    expected = logits.clone()
    apply_token_bitmask_reference(expected, bitmask, rows)
    launch_token_bitmask(library, logits, bitmask, rows)
    assert torch.equal(logits, expected)
