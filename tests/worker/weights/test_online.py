"""Plain weights made narrow: how near they stay, and what no weight may break."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from quire.ipc.spec.weight_format import WeightFormat, make_online_formats
from quire.kernels.linear.quantize_groups import launch_quantize_groups, quantize_groups_reference
from quire.worker.weights.integer_weight import IntegerWeight, dequantize
from quire.worker.weights.online import quantize

FORMATS = {name: make_online_formats(name, name).default for name in ("int4", "int8", "fp8")}  # type: ignore[arg-type]


def get(name: str) -> WeightFormat:
    format = FORMATS[name]
    assert format is not None
    return format


def make_weight(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(70, 300, generator=generator) * torch.logspace(-6, 6, 70).unsqueeze(1)
    weight[5] = 0
    return weight.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "relative"), [("int4", 0.2), ("int8", 1 / 253), ("fp8", 1 / 16)])
def test_a_number_is_off_by_a_part_of_its_rows_largest(
    name: str, relative: float, dtype: torch.dtype
) -> None:
    """int4 may also clip the largest; int8 rounds by half a step, fp8 by 2^-4 of a number."""
    weight = make_weight(dtype)
    before = weight.clone()
    error = (dequantize(quantize(weight, get(name))) - weight.float()).abs()
    assert torch.equal(weight, before)
    assert (error <= relative * weight.float().abs().amax(1, keepdim=True)).all()
    assert not error[5].any()


def test_clipping_makes_the_squared_error_of_4_bits_smaller_and_never_larger() -> None:
    weight, format = make_weight(), get("int4")
    narrow = quantize(weight, format)
    assert isinstance(narrow, IntegerWeight)

    def errors(numbers: torch.Tensor) -> torch.Tensor:
        squares = torch.nn.functional.pad((numbers - weight).square(), (0, 20))
        return squares.view(70, 5, 64).sum(2)

    groups = torch.nn.functional.pad(weight, (0, 20)).view(70, 5, 64)
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    scales = (largest / -8).bfloat16().float()
    plain = ((groups / scales).round().clamp(-8, 7) * scales).nan_to_num().view(70, 320)[:, :300]
    assert (errors(dequantize(narrow)) <= errors(plain) * (1 + 1e-6)).all()
    assert errors(dequantize(narrow))[10].sum() < 0.95 * errors(plain)[10].sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_in", "size"), [(300, 64), (301, 16), (64, 64), (5, 128)])
def test_the_native_quantizer_is_the_reference_but_for_ties(
    library: ctypes.CDLL, num_in: int, size: int, dtype: torch.dtype
) -> None:
    """Two clips of nearly the same error may change places: it is added in another order."""
    weight = make_weight(dtype)[:, :num_in] if num_in <= 300 else torch.randn(50, num_in).to(dtype)
    codes, scales = launch_quantize_groups(library, weight, size)
    expected_codes, expected_scales = quantize_groups_reference(weight, size)
    assert (scales == expected_scales).float().mean() > 0.99
    is_same = (scales == expected_scales).repeat_interleave(size, 1)[:, : num_in // 2 * 2 : 2]
    assert torch.equal(codes[:, : num_in // 2][is_same], expected_codes[:, : num_in // 2][is_same])
    if num_in % 2:
        assert torch.equal(codes[:, -1] & 15, expected_codes[:, -1] & 15) or not is_same.all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_number_that_is_not_finite_makes_nan_of_its_group_alone(value: float) -> None:
    """So that the model says what is wrong, as a plain one does, where 4 bits would pass for numbers."""
    weight = make_weight()
    whole = dequantize(quantize(weight, get("int4")))
    weight[7, 290] = value
    spoilt = dequantize(quantize(weight, get("int4")))
    assert spoilt[7, 256:].isnan().all()
    whole[7, 256:] = spoilt[7, 256:] = 0
    assert torch.equal(spoilt, whole)


def test_a_rows_codes_do_not_depend_on_the_rows_beside_it() -> None:
    weight = make_weight()
    for name in FORMATS:
        whole = dequantize(quantize(weight, get(name)))
        assert torch.equal(dequantize(quantize(weight[7:9], get(name))), whole[7:9])


@pytest.mark.parametrize("spoil", [lambda w: w.fill_(1e-38), lambda w: w.fill_(3e38)], ids=["tiny", "huge"])
@pytest.mark.parametrize("name", FORMATS)
def test_numbers_at_the_ends_of_the_range_stay_finite(name: str, spoil: Callable[..., object]) -> None:
    weight = torch.ones(3, 64)
    spoil(weight)
    assert dequantize(quantize(weight, get(name))).isfinite().all()
