"""Norm, activation, rotation: the compiled kernels against their torch references.

How bounds are derived: kernel_checks.py.
"""

from __future__ import annotations

import ctypes
from functools import partial

import pytest
import torch
from cache_layout import to_native_layout
from kernel_checks import (
    EPS,
    NORM_KINDS,
    RotateStep,
    assert_within,
    check_a_norm_in_place,
    check_layer_norm,
    check_rms_norm,
    check_where_a_norm_rounds,
    random,
)
from quire.kernels.attention.rotate_and_write import launch_rotate_and_write
from quire.kernels.linear.gated_activation import gated_activation_reference, launch_gated_activation
from quire.kernels.norm.layer_norm import launch_layer_norm
from quire.kernels.norm.rms_norm import launch_rms_norm

BF16_ROUNDING = 2.0**-8
DTYPES = [torch.float32, torch.bfloat16]


def rounding_of(dtype: torch.dtype) -> float:
    return BF16_ROUNDING if dtype == torch.bfloat16 else EPS


@pytest.mark.parametrize("kind", NORM_KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 16), (2, 17), (5, 48), (300, 260)])
def test_rms_norm_equals_its_reference(
    library: ctypes.CDLL, shape: tuple[int, int], dtype: torch.dtype, kind: tuple[float, bool]
) -> None:
    check_rms_norm(partial(launch_rms_norm, library), shape, dtype, kind)


def test_rms_norm_rounds_where_its_reference_does(library: ctypes.CDLL) -> None:
    check_where_a_norm_rounds(partial(launch_rms_norm, library))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_in_place_touches_only_its_columns(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    check_a_norm_in_place(partial(launch_rms_norm, library), dtype)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (3, 16), (2, 17), (5, 48), (300, 260)])
def test_layer_norm_equals_its_reference(
    library: ctypes.CDLL, shape: tuple[int, int], dtype: torch.dtype, has_bias: bool
) -> None:
    check_layer_norm(partial(launch_layer_norm, library), shape, dtype, has_bias)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_a_layer_norm_has_the_same_bits_alone(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    x, weight = random(300, 260, dtype=dtype), random(260, dtype=dtype)
    expected = launch_layer_norm(library, x, None, weight, None, 1e-5)
    for row in (0, 7, 299):
        assert torch.equal(
            launch_layer_norm(library, x[row : row + 1], None, weight, None, 1e-5)[0], expected[row]
        )


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
    "shape", [(1, 1, 8, 8), (4, 2, 16, 16), (6, 1, 40, 16), (3, 3, 72, 32), (8, 2, 128, 16)]
)
def test_rotate_and_write_equals_its_reference_and_touches_no_other_slot(
    library: ctypes.CDLL, shape: tuple[int, int, int, int], has_norm: bool, dtype: torch.dtype
) -> None:
    step = RotateStep.draw(shape, has_norm, dtype)
    query, k_cache, v_cache = step.call(partial(launch_rotate_and_write, library))
    expected, *caches, bound = step.reference()
    k_expected, v_expected = to_native_layout(*caches)
    assert_within(query, expected, bound)
    assert_within(k_cache, k_expected, bound)
    assert torch.equal(v_cache, v_expected)


def test_the_exponential_is_good_to_two_units_in_the_last_place(library: ctypes.CDLL) -> None:
    x = torch.cat([torch.linspace(-80, 80, 200_001), torch.linspace(-1, 1, 100_001), torch.zeros(1)])
    gate_up = torch.stack([x, torch.ones_like(x)])
    actual = launch_gated_activation(library, gate_up.t().contiguous(), "silu").flatten().double()
    expected = x.double() * torch.sigmoid(x.double())
    # x / (1 + e^-x): two units of the exponential, then half a unit each for the sum and the quotient.
    assert_within(actual, expected, 3 * EPS * expected.abs())
