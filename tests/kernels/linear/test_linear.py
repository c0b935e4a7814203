"""The linear kernels in every variant that runs here: right, and the same bits for a row in any company.

Bounds: a sum of n products, each addition rounded to float32 in any order, is off by at most n * eps times
the sum of magnitudes (Higham 3.1, with a unit to spare); bfloat16 results carry a rounding of 2^-8 on top.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from kernel_checks import EPS, assert_within, random
from quire.kernels.linear.gated_activation import FUNCTIONS
from quire.kernels.linear.linear import (
    Variant,
    choose_variant,
    find_variants,
    launch_linear,
    linear_reference,
    make_table,
    pack_linear,
)
from quire.kernels.program.native import set_num_threads
from torch import Tensor

BF16_ROUNDING = 2.0**-8
TYPES = [torch.float32, torch.bfloat16]


class Layer:
    """A packed weight with what else a call needs."""

    def __init__(
        self, library: ctypes.CDLL, variant: Variant, weight: Tensor, bias: Tensor | None = None
    ) -> None:
        self.library, self.variant, self.weight, self.bias = library, variant, weight, bias
        self.packed = pack_linear(library, weight)

    def __call__(self, x: Tensor, activation: str | None = None) -> Tensor:
        table = make_table(self.packed, self.variant, self.bias, activation)
        return launch_linear(self.library, table, x)

    def reference(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """y and the sum of magnitudes behind it, in double precision."""
        weight = self.weight.double()
        bias = None if self.bias is None else self.bias.double()
        size = linear_reference(x.double().abs(), weight.abs(), None if bias is None else bias.abs())
        return linear_reference(x.double(), weight, bias), size


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "num_in", "num_out"),
    [
        *((1, 1, 1), (1, 64, 96), (2, 300, 65), (5, 17, 128), (7, 513, 200), (15, 48, 33)),
        *((16, 64, 64), (17, 32, 31), (33, 600, 40), (97, 64, 130), (300, 256, 63)),
    ],
)
def test_linear_equals_its_reference(
    library: ctypes.CDLL,
    variant: Variant,
    rows: int,
    num_in: int,
    num_out: int,
    has_bias: bool,
    dtype: torch.dtype,
) -> None:
    x, weight = random(rows, num_in, dtype=dtype), random(num_out, num_in, dtype=dtype, seed=1)
    layer = Layer(library, variant, weight, random(num_out, dtype=dtype, seed=2) if has_bias else None)
    expected, magnitude = layer.reference(x)
    bound = (num_in + 2) * EPS * magnitude  # 2: bias and float32's own rounding of the result
    if dtype == torch.bfloat16:
        bound = bound + BF16_ROUNDING * expected.abs()
    actual = layer(x)
    assert actual.dtype == dtype
    assert actual.shape == expected.shape
    error = (actual.double() - expected).abs()
    assert (error <= bound).all(), f"largest excess {(error - bound).max().item():.3g}"


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("dtype", TYPES)
def test_an_activation_is_of_the_sum_before_it_is_rounded(
    library: ctypes.CDLL, variant: Variant, dtype: torch.dtype, activation: str
) -> None:
    weight = random(70, 48, dtype=dtype, seed=1)
    layer = Layer(library, variant, weight, random(70, dtype=dtype, seed=2) * 4)
    x = random(33, 48, dtype=dtype) / weight.double().norm(dim=1).mean().to(dtype)
    total, magnitude = layer.reference(x)
    expected = FUNCTIONS[activation](total)
    slope = 1.2  # at most, of all of them
    bound = slope * 52 * EPS * magnitude + 4 * EPS
    if dtype == torch.bfloat16:
        bound = bound + BF16_ROUNDING * expected.abs() + 7e-5 * (activation == "gelu")
    assert_within(layer(x, activation).double(), expected, bound)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_row_has_the_same_bits_in_any_company(
    library: ctypes.CDLL, variant: Variant, dtype: torch.dtype
) -> None:
    layer = Layer(library, variant, random(200, 700, dtype=dtype, seed=1))
    x = random(600, 700, dtype=dtype)
    alone = torch.cat([layer(row.unsqueeze(0)) for row in x])
    for rows in (2, 3, 5, 6, 7, 13, 15, 16, 17, 31, 32, 33, 48, 96, 97, 250, 257, 600):
        assert torch.equal(layer(x[:rows]), alone[:rows])
        assert torch.equal(layer(x[-rows:]), alone[-rows:])


@pytest.mark.parametrize(
    ("num_in", "num_out", "counts", "activation"),
    [(384, 1152, (65, 97, 128, 600), "gelu"), (96, 32, (65, 600), None), (1024, 1376, (256, 257), "silu")],
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_many_rows_have_the_bits_that_few_have(
    library: ctypes.CDLL,
    variant: Variant,
    num_in: int,
    num_out: int,
    counts: tuple[int, ...],
    activation: str | None,
    has_bias: bool,
) -> None:
    """K and N are whole tiles, which many rows are multiplied by in another order of rows and panels."""
    dtype = torch.bfloat16
    bias = random(num_out, dtype=dtype, seed=2) if has_bias else None
    layer = Layer(library, variant, random(num_out, num_in, dtype=dtype, seed=1), bias)
    x = random(max(counts), num_in, dtype=dtype) * num_in**-0.5
    few = torch.cat([layer(rows, activation) for rows in x.split(64)])
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 3):
            set_num_threads(num_threads)
            for count in counts:
                assert torch.equal(layer(x[:count], activation), few[:count])
                assert torch.equal(layer(x[-count:], activation), few[-count:])
    finally:
        set_num_threads(before)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_row_has_the_same_bits_with_any_number_of_threads(
    library: ctypes.CDLL, variant: Variant, dtype: torch.dtype
) -> None:
    layer = Layer(library, variant, random(500, 96, dtype=dtype, seed=1))
    x, results = random(40, 96, dtype=dtype), list[Tensor]()
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3, 7):
            set_num_threads(num_threads)
            results.append(layer(x))
    finally:
        set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_rows_give_no_rows(library: ctypes.CDLL, variant: Variant, dtype: torch.dtype) -> None:
    layer = Layer(library, variant, random(8, 16, dtype=dtype))
    assert layer(random(0, 16, dtype=dtype)).shape == (0, 8)


def test_a_nan_or_an_infinity_stays_in_its_row(library: ctypes.CDLL, variant: Variant) -> None:
    layer = Layer(library, variant, random(40, 50, dtype=torch.bfloat16, seed=1))
    x = random(20, 50, dtype=torch.bfloat16)
    clean = layer(x)
    x[3, 7], x[9, 49] = float("nan"), float("inf")
    dirty = layer(x)
    assert dirty[3].isnan().all()
    assert not dirty[9].isfinite().any()
    others = [row for row in range(20) if row not in (3, 9)]
    assert torch.equal(dirty[others], clean[others])


def test_the_best_variant_is_the_last_that_runs_here(library: ctypes.CDLL) -> None:
    assert choose_variant(library) == find_variants(library)[-1]
    assert find_variants(library)[0] == Variant.VECTOR
