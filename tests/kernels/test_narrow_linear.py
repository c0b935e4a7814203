"""Weights of 4 and 8 bits: the bits of a plain layer with the numbers that they stand for, or nearer to them.

PAIR rounds no weight, so its bound is that of test_linear.py: n * eps times the sum of magnitudes.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import pytest
import torch
from kernel_checks import EPS, assert_within, random
from quire.kernels.linear.linear import (
    PackedWeight,
    Variant,
    find_variants,
    launch_linear,
    make_table,
    pack_linear,
    pack_narrow_linear,
)
from torch import Tensor

ROWS = (1, 2, 3, 7, 16, 17, 32, 33, 64, 65, 260, 300)


@dataclass(frozen=True, slots=True)
class Form:
    """How weights are stored."""

    bits: int
    group_size: int = 0
    scale_dtype: torch.dtype = torch.float32
    has_offsets: bool = False
    has_codebook: bool = False
    is_fp8: bool = False


FORMS = [
    Form(4, 16),
    Form(4, 32, has_offsets=True),
    Form(4, 64, torch.bfloat16),
    Form(4, 128, has_codebook=True),
    Form(4, 48, torch.bfloat16, has_offsets=True, has_codebook=True),
    Form(4),
    Form(8),
    Form(8, 16, has_offsets=True),
    Form(8, 64, torch.bfloat16),
    Form(8, has_offsets=True),
    Form(8, is_fp8=True),
    Form(8, 128, is_fp8=True),
]


def make_weight(
    library: ctypes.CDLL, variant: Variant, form: Form, num_out: int, num_in: int
) -> tuple[PackedWeight, Tensor]:
    """Packed, and the numbers as float64 [N, K], in which they are exact. A codebook's are bfloat16's."""
    generator = torch.Generator().manual_seed(1)
    groups = -(-num_in // form.group_size) if form.group_size else 1
    scales = (random(num_out, groups, seed=2).abs() / 8).to(form.scale_dtype)
    offsets = random(num_out, groups, seed=3) if form.has_offsets else None
    codebook = random(16, seed=4).bfloat16().float() if form.has_codebook else None
    codes = torch.randint(0, 1 << form.bits, (num_out, num_in), dtype=torch.uint8, generator=generator)
    stored, units = codes, codes.double()
    if form.is_fp8:
        stored = torch.where(codes & 127 == 127, 0, codes).view(torch.float8_e4m3fn)
        units = stored.double()
    elif form.bits == 4:
        padded = torch.nn.functional.pad(codes, (0, num_in % 2))
        stored = padded[:, 0::2] | padded[:, 1::2] << 4
    if codebook is not None:
        units = codebook.double()[codes.int()]
    elif offsets is None and not form.is_fp8:
        units = units - (1 << form.bits - 1)

    def spread(numbers: Tensor) -> Tensor:
        return numbers.double().repeat_interleave(form.group_size or num_in, 1)[:, :num_in]

    numbers = units * spread(scales) - (0 if offsets is None else spread(offsets))
    packed = pack_narrow_linear(
        library, variant, stored, scales, form.bits, num_in, form.group_size, offsets, codebook
    )
    return packed, numbers


SHAPES = [(1, 1), (65, 300), (96, 128), (33, 513), (256, 384)]
# Every form in two shapes, every shape with four forms at least.
FORMS_IN_SHAPES = [
    pytest.param(form, *SHAPES[(number + more) % len(SHAPES)], id=f"{form} {number} {more}")
    for number, form in enumerate(FORMS)
    for more in (0, 2)
]


@pytest.mark.parametrize(("form", "num_out", "num_in"), FORMS_IN_SHAPES)
def test_a_narrow_layer_has_the_bits_of_a_plain_one(
    library: ctypes.CDLL, variant: Variant, form: Form, num_out: int, num_in: int
) -> None:
    narrow, numbers = make_weight(library, variant, form, num_out, num_in)
    rounded = numbers.bfloat16() if variant is Variant.TILE else numbers.float()
    plain = pack_linear(library, rounded)
    for dtype in (torch.bfloat16, torch.float32):
        if (variant, dtype) in ((Variant.PAIR, torch.bfloat16), (Variant.TILE, torch.float32)):
            continue
        for rows in ROWS:
            x = random(rows, num_in, dtype=dtype, seed=rows)
            actual = launch_linear(library, make_table(narrow, variant), x)
            expected = launch_linear(library, make_table(plain, variant), x.to(rounded.dtype))
            assert torch.equal(actual, expected.to(dtype)), (dtype, rows)


@pytest.mark.parametrize(("form", "num_out", "num_in"), FORMS_IN_SHAPES)
def test_pairs_round_no_weight_and_a_row_has_the_same_bits_in_any_company(
    library: ctypes.CDLL, form: Form, num_out: int, num_in: int
) -> None:
    if Variant.PAIR not in find_variants(library):
        pytest.skip("this processor has no such instructions")
    narrow, numbers = make_weight(library, Variant.PAIR, form, num_out, num_in)
    table = make_table(narrow, Variant.PAIR)
    x = random(max(ROWS), num_in, dtype=torch.bfloat16)
    alone = torch.cat([launch_linear(library, table, row.unsqueeze(0)) for row in x])
    expected, largest = x.double() @ numbers.T, numbers.abs()
    if narrow.offsets is not None:  # units and offset are added up apart, and may cancel out
        largest = largest.amax(1, keepdim=True).expand_as(numbers) * 2
    # A group's sum, its product with a scale, the same of an offset, and float32's rounding of the result.
    bound = (num_in + 4 * narrow.scales.shape[1] + 2) * EPS * (x.double().abs() @ largest.T)
    assert_within(alone.double(), expected, bound + 2.0**-8 * expected.abs())
    for rows in ROWS:
        assert torch.equal(launch_linear(library, table, x[:rows]), alone[:rows]), rows
        assert torch.equal(launch_linear(library, table, x[-rows:]), alone[-rows:]), rows


def test_bias_and_activation_are_of_the_sum_before_it_is_rounded(
    library: ctypes.CDLL, variant: Variant
) -> None:
    """Of a row alone, in float64, but for the sum's own roundings in float32."""
    narrow, numbers = make_weight(library, variant, FORMS[2], 65, 300)
    bias = random(65, dtype=torch.bfloat16)
    x = random(max(ROWS), 300, dtype=torch.bfloat16) / 16
    numbers = numbers.bfloat16().double() if variant is Variant.TILE else numbers
    expected = torch.nn.functional.silu(x.double() @ numbers.T + bias.double())
    bound = (
        1.2 * 310 * EPS * (x.double().abs() @ numbers.abs().T + bias.double().abs())
        + 2.0**-8 * expected.abs()
    )
    for rows in ROWS:
        actual = launch_linear(library, make_table(narrow, variant, bias, "silu"), x[:rows])
        assert_within(actual.double(), expected[:rows], bound[:rows] + 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_are_taken_in_the_order_that_the_weight_has(
    library: ctypes.CDLL, variant: Variant, dtype: torch.dtype
) -> None:
    if dtype is torch.float32 and variant is Variant.TILE:
        pytest.skip("what is packed for AMX goes with bfloat16")
    codes, scales = torch.randint(0, 256, (40, 96), dtype=torch.uint8), random(40, 3)
    order = torch.randperm(96, generator=torch.Generator().manual_seed(5), dtype=torch.int32)
    turned = pack_narrow_linear(library, variant, codes, scales, 8, 96, 32, permutation=order)
    straight = pack_narrow_linear(library, variant, codes, scales, 8, 96, 32)
    for rows in (1, 5, 300):
        x = random(rows, 96, dtype=dtype)
        actual = launch_linear(library, make_table(turned, variant), x)
        expected = launch_linear(library, make_table(straight, variant), x[:, order.long()].contiguous())
        assert torch.equal(actual, expected)


def test_every_code_in_every_place_of_a_tile_is_multiplied_as_itself(
    library: ctypes.CDLL, variant: Variant
) -> None:
    codes = (torch.arange(64 * 160).view(64, 160) * 7 % 256).to(torch.uint8)
    for bits in (4, 8):
        whole = codes & (1 << bits) - 1
        stored = whole if bits == 8 else whole[:, 0::2] | whole[:, 1::2] << 4
        packed = pack_narrow_linear(library, variant, stored, torch.ones(64, 1), bits, 160)
        expected = (whole.T.int() - (1 << bits - 1)).bfloat16()
        actual = launch_linear(library, make_table(packed, variant), torch.eye(160, dtype=torch.bfloat16))
        assert torch.equal(actual, expected)


def test_a_nan_or_an_infinity_stays_in_its_row(library: ctypes.CDLL, variant: Variant) -> None:
    narrow, _ = make_weight(library, variant, FORMS[2], 65, 300)
    table = make_table(narrow, variant)
    x = random(20, 300, dtype=torch.bfloat16)
    clean = launch_linear(library, table, x)
    x[3, 7], x[9, 49] = float("nan"), float("inf")
    dirty = launch_linear(library, table, x)
    assert dirty[3].isnan().all()
    others = [row for row in range(20) if row not in (3, 9)]
    assert torch.equal(dirty[others], clean[others])
