"""What the kernels' tests share: random tensors, bounds, and the checks that every implementation must pass.

u is half of a type's epsilon. A chain of n roundings of float32 is off by at most n u relative to the sum of
magnitudes (Higham 3.1); kernel and reference may each be off by that, and may then round to 16 bits apart.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self, TypeVar

import pytest
import torch
from quire.kernels.attention.rotate_and_write import rotate_and_write_reference
from quire.kernels.norm.layer_norm import layer_norm_reference
from quire.kernels.norm.rms_norm import add_rms_norm_reference, rms_norm_reference
from torch import Tensor

Group = TypeVar("Group")
Result = TypeVar("Result")
CPU = torch.device("cpu")
# Where Triton's kernels run; on a CPU they are interpreted.
TRITON_DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TRITON_DTYPES = [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]
EPS = torch.finfo(torch.float32).eps
# (weight offset, rounds_normed) of the norms that models have.
NORM_KINDS = [(0.0, True), (0.0, False), (1.0, False)]


def random(
    *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, device: torch.device = CPU
) -> Tensor:
    """Numbers around 0 of standard deviation 1, whole ones from -127 to 127 for int8."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.int8:
        return torch.randint(-127, 128, shape, dtype=dtype, generator=generator).to(device)
    return torch.randn(*shape, generator=generator).to(device, dtype)


def run_ranks(groups: list[Group], act: Callable[[Group], Result]) -> list[Result]:
    """What `act` returns in each rank, a thread of this process; raises what the first of them raises."""
    with ThreadPoolExecutor(len(groups)) as threads:
        return [future.result(timeout=30) for future in [threads.submit(act, group) for group in groups]]


def random_parts(size: int, count: int, dtype: torch.dtype) -> list[Tensor]:
    """What each rank brings; of very different magnitudes, so that the order of a sum shows."""
    generator = torch.Generator().manual_seed(count)
    scales = [10.0 ** (rank % 3) for rank in range(size)]
    return [(torch.randn(count, generator=generator) * scale).to(dtype) for scale in scales]


def assert_within(actual: Tensor, expected: Tensor, bound: Tensor | float) -> None:
    """Of the same shape and type, finite, and off by no more than the bound."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    error = (actual.double() - expected.double()).abs()
    assert torch.isfinite(actual).all()
    assert (error <= bound).all(), f"largest excess {(error - bound).max().item():.3g}"


def check_rms_norm(
    launch: Callable[..., Tensor],
    shape: tuple[int, int],
    dtype: torch.dtype,
    kind: tuple[float, bool],
    device: torch.device = CPU,
) -> None:
    """The norm of rows, and of rows that are added to a residual, equal the reference."""
    x, residual = (random(*shape, dtype=dtype, seed=seed, device=device) for seed in (0, 1))
    weight = random(shape[1], dtype=dtype, seed=2, device=device)
    # The normed value and the product are rounded to the type; the sum of squares adds its own chain.
    relative = torch.finfo(dtype).eps + (shape[1] + 6) * EPS
    expected = rms_norm_reference(x, weight, 1e-5, *kind)
    assert_within(launch(x, None, weight, 1e-5, *kind), expected, relative * expected.abs())
    expected, total = add_rms_norm_reference(x, residual, weight, 1e-5, *kind)
    actual = launch(x, residual, weight, 1e-5, *kind)
    assert torch.equal(residual, total)
    assert_within(actual, expected, relative * expected.abs())


def check_layer_norm(
    launch: Callable[..., Tensor],
    shape: tuple[int, int],
    dtype: torch.dtype,
    has_bias: bool,
    device: torch.device = CPU,
) -> None:
    """The norm of rows, and of rows that are added to a residual, equal the reference."""
    x, residual = (random(*shape, dtype=dtype, seed=seed, device=device) for seed in (0, 1))
    x += 3
    weight, bias = (random(shape[1], dtype=dtype, seed=seed, device=device) for seed in (2, 3))
    bias = bias if has_bias else None

    def check(actual: Tensor, total: Tensor) -> None:
        expected = layer_norm_reference(total, weight, bias, 1e-5)
        # Less the mean, numbers keep the rounding of their size; a chain adds up mean and variance.
        centered = total.float() - total.float().mean(-1, keepdim=True)
        factor = torch.rsqrt(centered.square().mean(-1, keepdim=True) + 1e-5)
        sizes = (
            (total.float().abs() + total.float().abs().mean(-1, keepdim=True)) * factor * weight.float().abs()
        )
        bound = torch.finfo(dtype).eps * expected.abs().float() + (shape[1] + 6) * EPS * (sizes + 1)
        assert_within(actual, expected, bound)

    check(launch(x, None, weight, bias, 1e-5), x)
    total = x.float() + residual.float()
    actual = launch(x, residual, weight, bias, 1e-5)
    assert torch.equal(residual, total.to(dtype))
    check(actual, total)


def check_where_a_norm_rounds(launch: Callable[..., Tensor], device: torch.device = CPU) -> None:
    """In bfloat16 nearly all numbers equal the reference's; rounded in another place a quarter would not."""
    x, weight = (random(*shape, dtype=torch.bfloat16, device=device) for shape in ((8, 1500), (1500,)))
    for kind in NORM_KINDS:
        expected = rms_norm_reference(x, weight, 1e-5, *kind)
        assert (launch(x, None, weight, 1e-5, *kind) == expected).float().mean() > 0.98, kind


def check_a_norm_in_place(
    launch: Callable[..., Tensor], dtype: torch.dtype, device: torch.device = CPU
) -> None:
    """A norm of some columns of a tensor touches no others."""
    whole, weight = (random(*shape, dtype=dtype, device=device) for shape in ((5, 70), (33,)))
    expected = whole.clone()
    expected[:, 20:53] = launch(whole[:, 20:53].contiguous(), None, weight, 1e-5)
    launch(whole[:, 20:53], None, weight, 1e-5, in_place=True)
    assert torch.equal(whole, expected)


@dataclass
class RotateStep:
    """What rotate_and_write is called with; caches are full of a number that shows what is not written."""

    qkv: Tensor  # [T, (H + 2 G) D]
    num_heads: int
    cos: Tensor  # [T, D / 2]
    sin: Tensor
    qk_norm: tuple[Tensor, Tensor, float] | None
    k_cache: Tensor  # [blocks, G, block_size, D]
    v_cache: Tensor
    slots: Tensor  # some neighbours in a block, the rest shuffled

    @classmethod
    def draw(
        cls,
        shape: tuple[int, int, int, int],
        has_norm: bool,
        dtype: torch.dtype,
        device: torch.device = CPU,
        tokens: int = 37,
    ) -> Self:
        """`shape` is (heads, kv heads, head size, block size)."""
        num_heads, num_kv_heads, head_size, block_size = shape
        blocks, near = 9, 3 + tokens * 3 // 5

        def draw(*size: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return random(*size, dtype=dtype, seed=seed, device=device)

        qk_norm = None
        if has_norm:
            qk_norm = (draw(head_size, seed=2, dtype=dtype), draw(head_size, seed=3, dtype=dtype), 1e-6)
        angle = draw(tokens, head_size // 2, seed=1) * 3
        shuffled = torch.randperm(blocks * block_size - near, generator=torch.Generator().manual_seed(4))
        slots = torch.cat([torch.arange(3, near), near + shuffled])[:tokens].to(device)
        k_cache, v_cache = (
            torch.full((blocks, num_kv_heads, block_size, head_size), 7.0, dtype=dtype, device=device)
            for _ in range(2)
        )
        qkv = draw(tokens, (num_heads + 2 * num_kv_heads) * head_size, seed=0, dtype=dtype)
        return cls(qkv, num_heads, angle.cos(), angle.sin(), qk_norm, k_cache, v_cache, slots)

    def call(self, function: Callable[..., Tensor | None]) -> tuple[Tensor, Tensor, Tensor]:
        """(queries [T, H, D], K and V as the function leaves them) on copies of what it overwrites."""
        qkv, k_cache, v_cache = self.qkv.clone(), self.k_cache.clone(), self.v_cache.clone()
        arguments = (self.num_heads, self.cos, self.sin, self.qk_norm, k_cache, v_cache, self.slots)
        query = function(qkv, *arguments)
        if query is None:  # it is left in qkv
            query = qkv.view(len(qkv), -1, k_cache.shape[3])[:, : self.num_heads]
        return query, k_cache, v_cache

    def reference(self) -> tuple[Tensor, Tensor, Tensor, float]:
        """What `call` gives for the reference, and how far off queries and keys may be."""
        query, k_cache, v_cache = self.call(rotate_and_write_reference)
        # The reference rounds cos, sin, both products and the sum to the type; the norm rounds twice before.
        has_norm = self.qk_norm is not None
        roundings = (5 + 2 * has_norm) * torch.finfo(query.dtype).eps / 2
        roundings += query.shape[2] * EPS * has_norm
        largest = max(query.abs().max().item(), k_cache.abs().max().item())
        return query, k_cache, v_cache, roundings * largest
