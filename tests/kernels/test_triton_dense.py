"""Gather, norm and activation in Triton against their torch references; interpreted where there is no GPU.

How bounds are derived: kernel_checks.py.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from kernel_checks import (
    EPS,
    NORM_KINDS,
    assert_within,
    check_a_norm_in_place,
    check_layer_norm,
    check_rms_norm,
    check_where_a_norm_rounds,
)
from kernel_checks import TRITON_DEVICE as DEVICE
from kernel_checks import random as random_on_cpu

pytest.importorskip("triton")

from quire.kernels.linear.gated_activation import gated_activation_reference
from quire.kernels.linear.gated_activation_triton import launch_gated_activation
from quire.kernels.norm.layer_norm_triton import launch_layer_norm
from quire.kernels.norm.rms_norm_triton import launch_rms_norm
from quire.kernels.program.gather_rows import gather_rows_reference
from quire.kernels.program.gather_rows_triton import launch_gather_rows

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
random = partial(random_on_cpu, device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 33), (5, 2048), (2, 4099)])
def test_gather_copies_the_rows_of_its_index(rows: int, size: int, dtype: torch.dtype) -> None:
    table = random(7, size, dtype=dtype)
    index = torch.tensor([6, 0, 3, 3, 6][:rows], device=DEVICE)
    assert torch.equal(launch_gather_rows(table, index), gather_rows_reference(table, index))


def test_gather_of_nothing_is_empty_and_strided_tables_are_refused() -> None:
    nothing = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    assert launch_gather_rows(random(3, 4), nothing).shape == (0, 4)
    with pytest.raises(AssertionError):
        launch_gather_rows(random(4, 3).t(), nothing)


@pytest.mark.parametrize("kind", NORM_KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 16), (2, 17), (4, 1500)])
def test_rms_norm_equals_its_reference(
    shape: tuple[int, int], dtype: torch.dtype, kind: tuple[float, bool]
) -> None:
    check_rms_norm(launch_rms_norm, shape, dtype, kind, DEVICE)


def test_rms_norm_rounds_where_its_reference_does() -> None:
    check_where_a_norm_rounds(launch_rms_norm, DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_in_place_touches_only_its_columns(dtype: torch.dtype) -> None:
    check_a_norm_in_place(launch_rms_norm, dtype, DEVICE)


def test_rms_norm_gives_a_row_the_same_bits_in_any_company() -> None:
    x, weight = random(9, 200, dtype=torch.bfloat16), random(200, dtype=torch.bfloat16, seed=1)
    alone = torch.cat([launch_rms_norm(row[None], None, weight, 1e-6) for row in x])
    assert torch.equal(launch_rms_norm(x, None, weight, 1e-6), alone)


def test_rms_norm_of_no_rows_is_empty_and_strided_rows_are_refused() -> None:
    assert launch_rms_norm(random(0, 8), None, random(8), 1e-6).shape == (0, 8)
    with pytest.raises(AssertionError):
        launch_rms_norm(random(8, 3).t(), None, random(8), 1e-6)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 16), (2, 17), (5, 260)])
def test_layer_norm_equals_its_reference(shape: tuple[int, int], dtype: torch.dtype, has_bias: bool) -> None:
    check_layer_norm(launch_layer_norm, shape, dtype, has_bias, DEVICE)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # as meant: the gate is then 0
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 33), (2, 2050)])
def test_gated_activation_equals_its_reference(
    rows: int, size: int, activation: str, dtype: torch.dtype
) -> None:
    gate_up = random(rows, 2 * size, dtype=dtype) * 4
    gate_up[0, 0] = -200.0  # exp(200) is beyond float32
    gate, up = (part.double() for part in gate_up.chunk(2, dim=-1))
    expected = gated_activation_reference(gate_up, activation)
    # 1 + erf and 1 + tanh cancel for negative gates: their error is relative to the gate, not to the result.
    bound = 2 * torch.finfo(dtype).eps * expected.abs().double() + 8 * EPS * (gate * up).abs()
    smallest = torch.finfo(dtype).tiny * (1 + up.abs())  # a GPU may flush what is below to 0
    assert_within(launch_gated_activation(gate_up, activation), expected, bound + smallest)


def test_gated_activation_of_no_rows_is_empty_and_unknown_names_are_refused() -> None:
    assert launch_gated_activation(random(0, 8), "silu").shape == (0, 4)
    with pytest.raises(AssertionError, match="softmax"):
        launch_gated_activation(random(1, 8), "softmax")
