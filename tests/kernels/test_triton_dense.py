"""Gather, norm and activation in Triton against their torch references; interpreted where there is no GPU.

u is half of the type's epsilon. A chain of n roundings of float32 is off by at most n u relative to the sum
of magnitudes (Higham 3.1); kernel and reference may each be off by that, and may then round to 16 bits apart.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from quire.kernels.gated_activation import gated_activation_reference
from quire.kernels.gated_activation_triton import launch_gated_activation
from quire.kernels.gather_rows import gather_rows_reference
from quire.kernels.gather_rows_triton import launch_gather_rows
from quire.kernels.rms_norm import add_rms_norm_reference, rms_norm_reference
from quire.kernels.rms_norm_triton import launch_rms_norm

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = torch.finfo(torch.float32).eps


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_within(actual: Tensor, expected: Tensor, bound: Tensor | float) -> None:
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    error = (actual.double() - expected.double()).abs()
    assert torch.isfinite(actual).all()
    assert (error <= bound).all(), f"largest excess {(error - bound).max().item():.3g}"


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


@pytest.mark.parametrize(("offset", "rounds_normed"), [(0.0, True), (0.0, False), (1.0, False)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 16), (2, 17), (4, 1500)])
def test_rms_norm_equals_its_reference(
    rows: int, size: int, dtype: torch.dtype, offset: float, rounds_normed: bool
) -> None:
    x, residual = random(rows, size, dtype=dtype), random(rows, size, dtype=dtype, seed=1)
    weight = random(size, dtype=dtype, seed=2)
    # The normed value and the product are rounded to the type; the sum of squares adds its own chain.
    relative = 2 * torch.finfo(dtype).eps + (size + 4) * EPS
    expected = rms_norm_reference(x, weight, 1e-5, offset, rounds_normed)
    assert_within(
        launch_rms_norm(x, None, weight, 1e-5, offset, rounds_normed), expected, relative * expected.abs()
    )
    expected, total = add_rms_norm_reference(x, residual, weight, 1e-5, offset, rounds_normed)
    actual = launch_rms_norm(x, residual, weight, 1e-5, offset, rounds_normed)
    assert torch.equal(residual, total)
    assert_within(actual, expected, relative * expected.abs())


@pytest.mark.parametrize("rounds_normed", [False, True])
def test_rms_norm_rounds_where_its_reference_does(rounds_normed: bool) -> None:
    x, weight = random(4, 1500, dtype=torch.bfloat16), random(1500, dtype=torch.bfloat16, seed=1)
    actual = launch_rms_norm(x, None, weight, 1e-5, rounds_normed=rounds_normed)
    expected = rms_norm_reference(x, weight, 1e-5, rounds_normed=rounds_normed)
    # A last bit of the root may turn a rounding; rounding in another place changes a quarter of the numbers.
    assert (actual == expected).float().mean() > 0.98


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_in_place_touches_only_its_columns(dtype: torch.dtype) -> None:
    whole, weight = random(5, 70, dtype=dtype), random(33, dtype=dtype, seed=1)
    before = whole.clone()
    expected = launch_rms_norm(whole[:, 20:53].contiguous(), None, weight, 1e-5)
    launch_rms_norm(whole[:, 20:53], None, weight, 1e-5, in_place=True)
    assert torch.equal(whole[:, 20:53], expected)
    assert torch.equal(whole[:, :20], before[:, :20])
    assert torch.equal(whole[:, 53:], before[:, 53:])


def test_rms_norm_gives_a_row_the_same_bits_in_any_company() -> None:
    x, weight = random(9, 200, dtype=torch.bfloat16), random(200, dtype=torch.bfloat16, seed=1)
    alone = torch.cat([launch_rms_norm(row[None], None, weight, 1e-6) for row in x])
    assert torch.equal(launch_rms_norm(x, None, weight, 1e-6), alone)


def test_rms_norm_of_no_rows_is_empty_and_strided_rows_are_refused() -> None:
    assert launch_rms_norm(random(0, 8), None, random(8), 1e-6).shape == (0, 8)
    with pytest.raises(AssertionError):
        launch_rms_norm(random(8, 3).t(), None, random(8), 1e-6)


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
    with pytest.raises(AssertionError, match="relu"):
        launch_gated_activation(random(1, 8), "relu")
