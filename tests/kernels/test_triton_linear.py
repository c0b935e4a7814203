"""Linear layers in Triton: right within derived bounds, and a row's bits depend on the row alone."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from kernel_checks import EPS, TRITON_DTYPES
from kernel_checks import TRITON_DEVICE as DEVICE
from kernel_checks import random as random_on_cpu
from torch import Tensor

pytest.importorskip("triton")

from quire.kernels.linear import linear_triton
from quire.kernels.linear.linear import linear_reference
from quire.kernels.linear.linear_triton import launch_linear, plan_segments

random = partial(random_on_cpu, device=DEVICE)


def assert_near(actual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """A chain of K products and sums, in float32 or wider, then one rounding to x's type."""
    wide = [None if part is None else part.double() for part in (x, weight, bias)]
    magnitudes = [None if part is None else part.abs() for part in wide]
    expected = linear_reference(*wide)
    bound = (x.shape[1] + 2) * EPS * linear_reference(*magnitudes)
    bound += torch.finfo(x.dtype).eps * expected.abs()
    assert actual.dtype == x.dtype
    error = (actual.double() - expected).abs()
    assert (error <= bound).all(), f"largest excess {(error - bound).max().item():.3g}"


# One segment and several, whole tiles and parts of them.
SHAPES = [(1, 1, 1), (3, 64, 64), (5, 200, 65), (17, 528, 70)]


@pytest.mark.parametrize("dtype", TRITON_DTYPES)
@pytest.mark.parametrize(("rows", "num_in", "num_out"), SHAPES)
def test_linear_equals_its_reference(rows: int, num_in: int, num_out: int, dtype: torch.dtype) -> None:
    x, weight = random(rows, num_in, dtype=dtype), random(num_out, num_in, dtype=dtype, seed=1)
    bias = random(num_out, dtype=dtype, seed=2)
    assert_near(launch_linear(x, weight), x, weight, None)
    assert_near(launch_linear(x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("dtype", TRITON_DTYPES)
@pytest.mark.parametrize(("rows", "num_in", "num_out"), SHAPES)
def test_linear_of_int8_weights_equals_its_reference(
    rows: int, num_in: int, num_out: int, dtype: torch.dtype
) -> None:
    x, weight = random(rows, num_in, dtype=dtype), random(num_out, num_in, dtype=torch.int8, seed=1)
    scale, bias = random(num_out, seed=2).abs() + 0.1, random(num_out, dtype=dtype, seed=3)
    real = weight.double() * scale.double()[:, None]
    assert_near(launch_linear(x, weight, None, scale), x, real, None)
    assert_near(launch_linear(x, weight, bias, scale), x, real, bias)


@pytest.mark.usefixtures("dots_in_order")
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_rows_have_the_same_bits_in_any_number(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_triton, "_MIN_SEGMENT", 128)
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    x, bias = random(64, 272, dtype=dtype), random(70, dtype=dtype, seed=2)
    weight = random(70, 272, dtype=torch.int8 if kind == "int8" else dtype, seed=1)
    scale = random(70, seed=3).abs() if kind == "int8" else None
    assert plan_segments(weight).count == 2
    few = launch_linear(x, weight, bias, scale)
    for start, rows in ((63, 1), (5, 3), (40, 16)):
        part = launch_linear(x[start : start + rows].contiguous(), weight, bias, scale)
        assert torch.equal(part, few[start : start + rows]), rows
    monkeypatch.setattr(linear_triton, "_FEW_ROWS", 16)
    monkeypatch.setattr(linear_triton, "_ENOUGH_TILES", 1)
    monkeypatch.setattr(linear_triton, "_linear_few", None)
    assert torch.equal(launch_linear(x, weight, bias, scale), few)


@pytest.mark.parametrize(("rows", "num_in", "num_out"), [(17, 40, 7), (130, 272, 140)])
def test_many_rows_take_the_kernel_that_adds_segments_in_turn(
    rows: int, num_in: int, num_out: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_triton, "_MIN_SEGMENT", 128)
    monkeypatch.setattr(linear_triton, "_FEW_ROWS", 16)
    monkeypatch.setattr(linear_triton, "_ENOUGH_TILES", 1)
    monkeypatch.setattr(linear_triton, "_linear_few", None)
    x, weight = random(rows, num_in, dtype=torch.bfloat16), random(num_out, num_in, dtype=torch.bfloat16)
    assert_near(launch_linear(x, weight), x, weight, None)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="the sizes of real models, for a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_in", "num_out"), [(3072, 1024), (1024, 6144), (4096, 28672), (1024, 151_936)])
def test_rows_of_real_layers_have_the_same_bits_in_any_number(
    num_in: int, num_out: int, dtype: torch.dtype
) -> None:
    x, weight = random(2048, num_in, dtype=dtype), random(num_out, num_in, dtype=dtype, seed=1)
    many = launch_linear(x, weight)
    for rows in (1, 3, 16, 17, 64, 65, 300, 1024):
        assert torch.equal(launch_linear(x[:rows], weight), many[:rows]), rows
        assert torch.equal(launch_linear(x[-rows:], weight), many[-rows:]), rows


def test_no_rows_are_an_empty_result_and_strides_and_lone_scales_are_refused() -> None:
    assert launch_linear(random(0, 8), random(4, 8)).shape == (0, 4)
    with pytest.raises(AssertionError):
        launch_linear(random(8, 3).t(), random(4, 8))
    with pytest.raises(AssertionError):
        launch_linear(random(3, 8), random(4, 8), None, random(4))
