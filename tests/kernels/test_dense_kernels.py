"""Norm, activation, rotation: the compiled kernels against their torch references.

Bounds: a chain of n roundings of float32 is off by at most n * u relative to the sum of magnitudes
(u = eps / 2, Higham 3.1); kernel and reference may each be off by that. bfloat16 results carry one or two
roundings of 2^-8 relative on top.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from cache_layout import to_native_layout
from quire.kernels.gated_activation import gated_activation_reference, launch_gated_activation
from quire.kernels.rms_norm import add_rms_norm_reference, launch_rms_norm, rms_norm_reference
from quire.kernels.rotate_and_write import launch_rotate_and_write, rotate_and_write_reference
from torch import Tensor

EPS = torch.finfo(torch.float32).eps
BF16_ROUNDING = 2.0**-8
DTYPES = [torch.float32, torch.bfloat16]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_within(actual: Tensor, expected: Tensor, bound: Tensor | float) -> None:
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    error = (actual.double() - expected.double()).abs()
    assert torch.isfinite(actual).all()
    assert (error <= bound).all(), f"largest excess {(error - bound).max().item():.3g}"


def rounding_of(dtype: torch.dtype) -> float:
    return BF16_ROUNDING if dtype == torch.bfloat16 else EPS


@pytest.mark.parametrize(("offset", "rounds_normed"), [(0.0, True), (0.0, False), (1.0, False)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 16), (2, 17), (5, 48), (300, 260)])
def test_rms_norm_equals_its_reference(
    library: ctypes.CDLL, rows: int, size: int, dtype: torch.dtype, offset: float, rounds_normed: bool
) -> None:
    x, residual = random(rows, size, dtype=dtype), random(rows, size, dtype=dtype, seed=1)
    weight = random(size, dtype=dtype, seed=2)
    # Rounding of the normed value and of the product; the sum of squares adds its own chain.
    relative = 2 * rounding_of(dtype) + (size + 4) * EPS
    expected = rms_norm_reference(x, weight, 1e-5, offset, rounds_normed)
    assert_within(
        launch_rms_norm(library, x, None, weight, 1e-5, offset, rounds_normed),
        expected,
        relative * expected.abs(),
    )
    expected, total = add_rms_norm_reference(x, residual, weight, 1e-5, offset, rounds_normed)
    actual = launch_rms_norm(library, x, residual, weight, 1e-5, offset, rounds_normed)
    assert torch.equal(residual, total)
    assert_within(actual, expected, relative * expected.abs())


@pytest.mark.parametrize("rounds_normed", [False, True])
def test_rms_norm_rounds_where_its_reference_does(library: ctypes.CDLL, rounds_normed: bool) -> None:
    x, weight = random(300, 260, dtype=torch.bfloat16), random(260, dtype=torch.bfloat16, seed=1)
    actual = launch_rms_norm(library, x, None, weight, 1e-5, rounds_normed=rounds_normed)
    expected = rms_norm_reference(x, weight, 1e-5, rounds_normed=rounds_normed)
    # A last bit of the root may turn a rounding; rounding in another place changes a quarter of the numbers.
    assert (actual == expected).float().mean() > 0.98


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_in_place_touches_only_its_columns(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    whole, weight = random(5, 70, dtype=dtype), random(33, dtype=dtype, seed=1)
    before = whole.clone()
    expected = launch_rms_norm(library, whole[:, 20:53].contiguous(), None, weight, 1e-5)
    launch_rms_norm(library, whole[:, 20:53], None, weight, 1e-5, in_place=True)
    assert torch.equal(whole[:, 20:53], expected)
    assert torch.equal(whole[:, :20], before[:, :20])
    assert torch.equal(whole[:, 53:], before[:, 53:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (2, 16), (3, 33), (200, 250)])
def test_gated_activation_equals_its_reference(
    library: ctypes.CDLL, rows: int, size: int, activation: str, dtype: torch.dtype
) -> None:
    gate_up = random(rows, 2 * size, dtype=dtype) * 5
    gate_up[0, 0] = -200.0  # exp(200) is beyond float32
    expected = gated_activation_reference(gate_up.double(), activation)
    relative = 2 * rounding_of(dtype) + 8 * EPS  # exp is good to 2 units, then a sum, a quotient, a product
    bound = relative * expected.abs() + torch.finfo(torch.float32).tiny * 1e4
    if activation != "silu":
        # The gelus' exponent takes 4 roundings to compute: the tail is off by as many units times it.
        gate, up = gate_up.double().chunk(2, dim=-1)
        exponent = gate**2 / 2 if activation == "gelu" else 1.6 * gate.abs() * (1 + 0.045 * gate**2)
        bound += 4 * EPS * torch.where(gate < 0, exponent.clamp(1, 88), 1) * expected.abs()
        bound += 1e-15 * (gate * up).abs()  # the reference's own cancellation
    actual = launch_gated_activation(library, gate_up, activation)
    assert actual.dtype == dtype
    assert_within(actual.double(), expected, bound)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_size", "block_size"),
    [(1, 1, 8, 8), (4, 2, 16, 16), (6, 1, 40, 16), (3, 3, 72, 32), (8, 2, 128, 16)],
)
def test_rotate_and_write_equals_its_reference(
    library: ctypes.CDLL,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    block_size: int,
    has_norm: bool,
    dtype: torch.dtype,
) -> None:
    tokens, blocks = 37, 9
    qkv = random(tokens, (num_heads + 2 * num_kv_heads) * head_size, dtype=dtype)
    angle = random(tokens, head_size // 2, seed=1) * 3
    cos, sin = angle.cos(), angle.sin()
    qk_norm = None
    if has_norm:
        qk_norm = (random(head_size, dtype=dtype, seed=2), random(head_size, dtype=dtype, seed=3), 1e-6)
    # Runs of neighbouring slots, and a shuffled rest.
    slots = torch.cat([torch.arange(3, 25), 25 + torch.randperm(blocks * block_size - 25)])[:tokens]
    size = (blocks, num_kv_heads, block_size, head_size)
    k_expected, v_expected = torch.zeros(size, dtype=dtype), torch.zeros(size, dtype=dtype)
    k_actual, v_actual = torch.zeros(size, dtype=dtype), torch.zeros(size, dtype=dtype)
    expected = rotate_and_write_reference(qkv, num_heads, cos, sin, qk_norm, k_expected, v_expected, slots)
    launch_rotate_and_write(library, qkv, num_heads, cos, sin, qk_norm, k_actual, v_actual, slots)
    actual = qkv.view(tokens, -1, head_size)[:, :num_heads]
    k_expected, v_expected = to_native_layout(k_expected, v_expected)
    # In bfloat16 the reference rounds cos, sin, both products and the sum; the norm rounds twice before.
    roundings = (5 + 2 * has_norm) * rounding_of(dtype) + head_size * EPS * has_norm
    largest = max(expected.abs().max().item(), k_expected.abs().max().item())
    assert_within(actual, expected, roundings * largest)
    assert_within(k_actual, k_expected, roundings * largest)
    assert torch.equal(v_actual, v_expected)


def test_the_exponential_is_good_to_two_units_in_the_last_place(library: ctypes.CDLL) -> None:
    x = torch.cat([torch.linspace(-80, 80, 200_001), torch.linspace(-1, 1, 100_001), torch.zeros(1)])
    gate_up = torch.stack([x, torch.ones_like(x)])
    actual = launch_gated_activation(library, gate_up.t().contiguous(), "silu").flatten().double()
    expected = x.double() * torch.sigmoid(x.double())
    # x / (1 + e^-x): two units of the exponential, then half a unit each for the sum and the quotient.
    assert_within(actual, expected, 3 * EPS * expected.abs())
