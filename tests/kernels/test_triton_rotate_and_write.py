"""Norm, rotation and cache write in Triton against the torch reference; interpreted where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from quire.kernels.rotate_and_write import rotate_and_write_reference
from quire.kernels.rotate_and_write_triton import launch_rotate_and_write

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPS = torch.finfo(torch.float32).eps
DTYPES = [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_size", "block_size"),
    [(1, 1, 2, 8), (7, 1, 40, 128), (3, 3, 80, 16), (14, 2, 256, 32)],
)
def test_a_step_equals_the_reference_and_touches_no_other_slot(
    num_heads: int, num_kv_heads: int, head_size: int, block_size: int, has_norm: bool, dtype: torch.dtype
) -> None:
    tokens, blocks = 11, 4
    qkv = random(tokens, (num_heads + 2 * num_kv_heads) * head_size, dtype=dtype)
    angle = random(tokens, head_size // 2, seed=1) * 3
    qk_norm = None
    if has_norm:
        qk_norm = (random(head_size, dtype=dtype, seed=2), random(head_size, dtype=dtype, seed=3), 1e-6)
    slots = torch.randperm(blocks * block_size, generator=torch.Generator().manual_seed(4))[:tokens].to(
        DEVICE
    )
    size = (blocks, num_kv_heads, block_size, head_size)
    expected_caches = [torch.full(size, 7.0, dtype=dtype, device=DEVICE) for _ in range(2)]
    caches = [cache.clone() for cache in expected_caches]
    arguments = (num_heads, angle.cos(), angle.sin(), qk_norm)
    expected = rotate_and_write_reference(qkv, *arguments, *expected_caches, slots)
    launch_rotate_and_write(qkv, *arguments, *caches, slots)
    actual = qkv.view(tokens, -1, head_size)[:, :num_heads]
    # The reference rounds cos, sin, both products and the sum to the type; the norm rounds twice before.
    roundings = (5 + 2 * has_norm) * torch.finfo(dtype).eps / 2 + head_size * EPS * has_norm
    largest = max(expected.abs().max().item(), expected_caches[0].abs().max().item())
    torch.testing.assert_close(actual, expected, rtol=0, atol=roundings * largest)
    torch.testing.assert_close(caches[0], expected_caches[0], rtol=0, atol=roundings * largest)
    assert torch.equal(caches[1], expected_caches[1])


def test_a_negative_slot_is_written_nowhere() -> None:
    qkv = random(3, 4 * 16)
    cache = torch.zeros(2, 1, 8, 16, device=DEVICE)
    cos = torch.ones(3, 8, device=DEVICE)
    slots = torch.tensor([-1, 5, -1], device=DEVICE)
    k_cache, v_cache = cache.clone(), cache.clone()
    launch_rotate_and_write(qkv, 2, cos, torch.zeros_like(cos), None, k_cache, v_cache, slots)
    for written, column in ((k_cache, 2), (v_cache, 3)):
        assert torch.equal(written[0, 0, 5], qkv[1, column * 16 : (column + 1) * 16])
        assert written.count_nonzero() == 16
