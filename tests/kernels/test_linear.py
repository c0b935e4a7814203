"""The linear kernels in every variant that runs here: right, and the same bits for a row in any company.

Bounds: a sum of n products, each addition rounded to float32 in any order, is off by at most n * eps times
the sum of magnitudes (Higham 3.1, with a unit to spare); bfloat16 results carry a rounding of 2^-8 on top.
Integer tiles add without rounding, but take x as multiples of 2^-22 of a power of two that is at most twice
its row's largest magnitude: each is off by half of that at most, which is eps times the largest.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from kernel_checks import EPS, assert_within, random
from quire.kernels.gated_activation import FUNCTIONS
from quire.kernels.linear import (
    Variant,
    choose_variant,
    find_variants,
    launch_linear,
    linear_reference,
    pack_linear,
    quantize_and_pack_linear,
)
from quire.kernels.linear_int8 import linear_int8_reference, quantize_int8
from quire.kernels.native import set_num_threads
from torch import Tensor

BF16_ROUNDING = 2.0**-8
# (type of x and y, type of W)
TYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.int8),
    (torch.bfloat16, torch.int8),
]


@pytest.fixture(params=list(Variant), ids=lambda variant: variant.name)
def variant(request: pytest.FixtureRequest, library: ctypes.CDLL) -> Variant:
    if request.param not in find_variants(library):
        pytest.skip("this processor has no such instructions")
    return request.param


class Layer:
    """A packed weight with what else a call needs."""

    def __init__(
        self, library: ctypes.CDLL, variant: Variant, weight: Tensor, bias: Tensor | None = None
    ) -> None:
        self.library, self.variant, self.weight, self.bias = library, variant, weight, bias
        self.packed = pack_linear(library, weight)
        self.scales = random(len(weight), seed=3).abs() if weight.dtype == torch.int8 else None

    def __call__(self, x: Tensor, activation: str | None = None) -> Tensor:
        return launch_linear(
            self.library,
            self.variant,
            x,
            self.packed,
            len(self.weight),
            self.bias,
            self.weight.dtype,
            self.scales,
            activation,
        )

    def reference(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """y and the sum of magnitudes behind it, in double precision."""
        weight = self.weight.double()
        if self.scales is not None:
            weight = weight * self.scales.double().unsqueeze(1)
        bias = None if self.bias is None else self.bias.double()
        size = linear_reference(x.double().abs(), weight.abs(), None if bias is None else bias.abs())
        return linear_reference(x.double(), weight, bias), size


@pytest.mark.parametrize(("dtype", "weight_dtype"), TYPES)
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
    weight_dtype: torch.dtype,
) -> None:
    x, weight = random(rows, num_in, dtype=dtype), random(num_out, num_in, dtype=weight_dtype, seed=1)
    layer = Layer(library, variant, weight, random(num_out, dtype=dtype, seed=2) if has_bias else None)
    expected, magnitude = layer.reference(x)
    bound = (num_in + 3) * EPS * magnitude  # 3: scale, bias and float32's own rounding of the result
    if variant == Variant.TILE and (dtype, weight_dtype) == (torch.bfloat16, torch.int8):
        largest = x.double().abs().amax(dim=1, keepdim=True).expand_as(x)
        bound = 5 * EPS * magnitude + EPS * layer.reference(largest)[1]  # 5: two joins, factor, scale, bias
    if dtype == torch.bfloat16:
        bound = bound + BF16_ROUNDING * expected.abs()
    actual = layer(x)
    assert actual.dtype == dtype
    assert actual.shape == expected.shape
    error = (actual.double() - expected).abs()
    assert (error <= bound).all(), f"largest excess {(error - bound).max().item():.3g}"


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize(("dtype", "weight_dtype"), TYPES)
def test_an_activation_is_of_the_sum_before_it_is_rounded(
    library: ctypes.CDLL, variant: Variant, dtype: torch.dtype, weight_dtype: torch.dtype, activation: str
) -> None:
    weight = random(70, 48, dtype=weight_dtype, seed=1)
    layer = Layer(library, variant, weight, random(70, dtype=dtype, seed=2) * 4)
    x = random(33, 48, dtype=dtype) / weight.double().norm(dim=1).mean().to(dtype)
    total, magnitude = layer.reference(x)
    expected = FUNCTIONS[activation](total)
    slope = 1.2  # at most, of all of them
    bound = slope * 52 * EPS * magnitude + 4 * EPS
    if dtype == torch.bfloat16:
        bound = bound + BF16_ROUNDING * expected.abs() + 7e-5 * (activation == "gelu")
    assert_within(layer(x, activation).double(), expected, bound)


@pytest.mark.parametrize(("dtype", "weight_dtype"), TYPES)
def test_a_row_has_the_same_bits_in_any_company(
    library: ctypes.CDLL, variant: Variant, dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    layer = Layer(library, variant, random(200, 700, dtype=weight_dtype, seed=1))
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


@pytest.mark.parametrize(("dtype", "weight_dtype"), TYPES)
def test_a_row_has_the_same_bits_with_any_number_of_threads(
    library: ctypes.CDLL, variant: Variant, dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    layer = Layer(library, variant, random(500, 96, dtype=weight_dtype, seed=1))
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


def test_every_int8_number_in_every_place_of_a_tile_is_multiplied_as_itself(
    library: ctypes.CDLL, variant: Variant
) -> None:
    weight = (torch.arange(64 * 160).view(64, 160) * 7 % 255 - 127).to(torch.int8)
    layer = Layer(library, variant, weight)
    layer.scales = torch.ones(64)
    assert torch.equal(layer(torch.eye(160, dtype=torch.bfloat16)), weight.T.bfloat16())


def test_integer_tiles_lose_nothing_of_numbers_near_the_largest(library: ctypes.CDLL) -> None:
    """Sums of up to 2^24 are exact in float32, so only what is lost of x can show."""
    if Variant.TILE not in find_variants(library):
        pytest.skip("this processor has no such instructions")
    weight = random(48, 200, dtype=torch.int8).sign()
    layer = Layer(library, Variant.TILE, weight)
    layer.scales = torch.ones(48)
    for exponent in (-90, -20, 0, 30, 100):
        x = torch.ldexp(random(7, 200, dtype=torch.int8).bfloat16(), torch.tensor(exponent))
        expected = (x.double() @ weight.double().T).bfloat16()
        assert torch.equal(layer(x), expected)
    tiny = torch.full((1, 200), 2.0**-130, dtype=torch.bfloat16)
    assert torch.equal(layer(tiny), torch.zeros(1, 48, dtype=torch.bfloat16))


@pytest.mark.parametrize("num_in", [132_104, 132_105, 140_000])
def test_sums_of_int8_weights_do_not_overflow(library: ctypes.CDLL, variant: Variant, num_in: int) -> None:
    """1 + 2^-6 is 33 * 65536 - 128 * 256 parts of 2^21: its middle byte is as large as one can be."""
    layer = Layer(library, variant, torch.full((3, num_in), 127, dtype=torch.int8))
    layer.scales = torch.ones(3)
    x = torch.full((1, num_in), 1 + 2.0**-6, dtype=torch.bfloat16)
    expected, _ = layer.reference(x)
    assert torch.allclose(layer(x).double(), expected, rtol=2 * BF16_ROUNDING)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_none_makes_its_whole_row_none_with_int8_weights(
    library: ctypes.CDLL, variant: Variant, bad: float
) -> None:
    layer = Layer(library, variant, random(40, 50, dtype=torch.int8, seed=1).clamp(1, 127))
    x = random(20, 50, dtype=torch.bfloat16)
    clean = layer(x)
    x[3, 7] = bad
    dirty = layer(x)
    assert not dirty[3].isfinite().any()
    assert torch.equal(dirty[[r for r in range(20) if r != 3]], clean[[r for r in range(20) if r != 3]])


def test_the_best_variant_is_the_last_that_runs_here(library: ctypes.CDLL) -> None:
    assert choose_variant(library) == find_variants(library)[-1]
    assert find_variants(library)[0] == Variant.VECTOR


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantized_weights_are_within_half_a_scale(dtype: torch.dtype) -> None:
    weight = random(70, 300, dtype=dtype) * torch.logspace(-6, 6, 70).unsqueeze(1).to(dtype)
    weight[5] = 0
    before = weight.clone()
    quantized, scales = quantize_int8(weight)
    assert torch.equal(weight, before)
    assert torch.equal(quantized.abs().amax(dim=1), torch.where(torch.arange(70) == 5, 0, 127).to(torch.int8))
    error = (quantized.double() * scales.double().unsqueeze(1) - weight.double()).abs().amax(dim=1)
    assert (error <= scales * (0.5 + 127 * EPS)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packing_quantizes_as_torch_does(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    weight = random(70, 300, dtype=dtype)
    weight[5] = 0
    quantized, scales = quantize_int8(weight)
    packed, actual_scales = quantize_and_pack_linear(library, weight)
    assert torch.equal(actual_scales, scales)
    assert torch.equal(packed, pack_linear(library, quantized))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_int8_reference_is_the_product_with_the_scaled_weight(dtype: torch.dtype) -> None:
    x, quantized = random(9, 64, dtype=dtype), random(33, 64, dtype=torch.int8)
    scales, bias = random(33, seed=1).abs(), random(33, seed=2)
    weight = quantized.double() * scales.double().unsqueeze(1)
    expected = linear_reference(x.double(), weight, bias.double())
    actual = linear_int8_reference(x, quantized, scales, bias)
    assert actual.dtype == dtype
    magnitude = linear_reference(x.double().abs(), weight.abs(), bias.double().abs())
    rounding = 3 * BF16_ROUNDING if dtype == torch.bfloat16 else 70 * EPS
    assert ((actual.double() - expected).abs() <= rounding * magnitude).all()
