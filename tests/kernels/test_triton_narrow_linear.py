"""Linear layers of narrow weights in Triton: the numbers of `dequantize`, rows whose bits are their own."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from kernel_checks import EPS
from kernel_checks import TRITON_DEVICE as DEVICE
from kernel_checks import random as random_on_cpu
from quire.kernels.triton import triton_runtime
from quire.worker.layers.linear import make_linear
from quire.worker.weights.integer_weight import (
    IntegerWeight,
    NarrowWeight,
    ScaledFp8Weight,
    dequantize,
    pack_nibbles,
)
from torch import Tensor

pytest.importorskip("triton")

from quire.kernels.linear import linear_triton, narrow_linear_triton

random = partial(random_on_cpu, device=DEVICE)

KINDS = {
    "int4, groups of 128": {"bits": 4, "group_size": 128},
    "int4, groups of 32, offsets": {"bits": 4, "group_size": 32, "has_offsets": True},
    "int4, groups of 48": {"bits": 4, "group_size": 48},
    "int4, one group, permuted": {"bits": 4, "is_permuted": True},
    "codebook": {"bits": 4, "group_size": 64, "has_codebook": True},
    "codebook, offsets": {"bits": 4, "group_size": 64, "has_codebook": True, "has_offsets": True},
    "int8, groups of 64": {"bits": 8, "group_size": 64},
    "int8, offsets": {"bits": 8, "has_offsets": True},
    "int8, groups of 16, bfloat16 scales": {"bits": 8, "group_size": 16, "scale_dtype": torch.bfloat16},
}
FP8 = {"tensor": (0, 0), "channel": (1, 0), "blocks": (128, 128)}


def make_integer(
    num_out: int,
    num_in: int,
    bits: int,
    group_size: int = 0,
    has_offsets: bool = False,
    has_codebook: bool = False,
    is_permuted: bool = False,
    scale_dtype: torch.dtype = torch.float32,
) -> IntegerWeight:
    generator = torch.Generator().manual_seed(num_in)
    codes = torch.randint(1 << bits, (num_out, num_in), generator=generator, dtype=torch.uint8)
    groups = -(-num_in // group_size) if group_size else 1
    scales = (torch.rand(num_out, groups, generator=generator) + 0.1).to(scale_dtype)
    offsets = torch.randn(num_out, groups, generator=generator) if has_offsets else None
    codebook = torch.randn(16, generator=generator) if has_codebook else None
    permutation = torch.randperm(num_in, generator=generator).int() if is_permuted else None
    codes = pack_nibbles(codes) if bits == 4 else codes
    parts = (None if part is None else part.to(DEVICE) for part in (offsets, permutation, codebook))
    return IntegerWeight(codes.to(DEVICE), scales.to(DEVICE), bits, num_in, group_size, *parts)


def make_fp8(num_out: int, num_in: int, group_rows: int, group_size: int) -> ScaledFp8Weight:
    # Every number there is, subnormals too, but not its two NaNs.
    codes = (torch.arange(num_out * num_in) % 127 + torch.arange(num_out * num_in) // 127 % 2 * 128).to(
        torch.uint8
    )
    values = codes.view(num_out, num_in).view(torch.float8_e4m3fn)
    shape = (-(-num_out // (group_rows or num_out)), -(-num_in // (group_size or num_in)))
    return ScaledFp8Weight(values.to(DEVICE), random(*shape).abs() + 0.1, group_rows, group_size)


def compute(x: Tensor, weight: NarrowWeight, bias: Tensor | None, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    with monkeypatch.context() as patch:
        patch.setattr(triton_runtime, "DEVICE_TYPES", {"cpu", "cuda"})
        patch.setattr("quire.kernels.choice.find_library", lambda *_: None)
        layer = make_linear(weight, bias, x.dtype)
        assert type(layer).__name__ == "TritonNarrowLinear"
        assert layer.is_exact
        return layer(x)


def assert_near(actual: Tensor, x: Tensor, weight: NarrowWeight, bias: Tensor | None) -> None:
    """A chain of K products and sums of the reference's numbers, then one rounding to x's type."""
    numbers = dequantize(weight).to(x.dtype).double()
    expected = x.double() @ numbers.T + (0 if bias is None else bias.double())
    terms = x.double().abs() @ numbers.abs().T + (0 if bias is None else bias.double().abs())
    rounding = 0.0 if x.dtype is torch.float32 else torch.finfo(x.dtype).eps / 2
    bound = (x.shape[1] + 8) * EPS * terms + rounding * expected.abs() + 1e-30
    assert ((actual.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("kind", KINDS)
def test_integer_weights_give_what_their_reference_stands_for(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = make_integer(70, 288, **KINDS[kind])
    bias = random(70, dtype=torch.bfloat16, seed=3)
    for rows, own_bias in ((1, None), (17, bias)):
        x = random(rows, 288, dtype=torch.bfloat16, seed=rows)
        assert_near(compute(x, weight, own_bias, monkeypatch), x, weight, own_bias)


@pytest.mark.parametrize("kind", FP8)
def test_fp8_weights_give_what_their_reference_stands_for(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = make_fp8(130, 272, *FP8[kind])
    for dtype in (torch.bfloat16, torch.float32):
        x = random(3, 272, dtype=dtype)
        assert_near(compute(x, weight, None, monkeypatch), x, weight, None)


def test_a_lone_one_gives_each_number_of_the_reference_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [make_integer(33, 96, **KINDS[kind]) for kind in KINDS]
    for weight in (*weights, make_fp8(33, 96, 1, 32)):
        actual = compute(torch.eye(96, device=DEVICE), weight, None, monkeypatch)
        assert torch.equal(actual.T, dequantize(weight))


@pytest.mark.parametrize("kind", ["int4, groups of 128", "int8, groups of 64", "int4, one group, permuted"])
def test_rows_have_the_same_bits_in_any_number(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":
        triton_interpreter = pytest.importorskip("triton_interpreter")
        builder = triton_interpreter.interpreter.InterpreterBuilder
        monkeypatch.setattr(builder, "create_dot", triton_interpreter.multiply_in_order)
    monkeypatch.setattr(linear_triton, "_MIN_SEGMENT", 128)
    weight = make_integer(70, 272, **KINDS[kind])
    x, bias = random(64, 272, dtype=torch.bfloat16), random(70, dtype=torch.bfloat16, seed=2)
    few = compute(x, weight, bias, monkeypatch)
    assert_near(few, x, weight, bias)
    for start, rows in ((63, 1), (5, 3), (40, 16)):
        part = compute(x[start : start + rows].contiguous(), weight, bias, monkeypatch)
        assert torch.equal(part, few[start : start + rows]), rows
    monkeypatch.setattr(linear_triton, "_FEW_ROWS", 16)
    monkeypatch.setattr(linear_triton, "_ENOUGH_TILES", 1)
    monkeypatch.setattr(narrow_linear_triton, "_narrow_linear_few", None)
    assert torch.equal(compute(x, weight, bias, monkeypatch), few)


def test_a_packed_weight_holds_no_more_bytes_than_its_format_says() -> None:
    weight = make_integer(64, 256, bits=4, group_size=64, has_offsets=True)
    packed = narrow_linear_triton.pack_narrow_weight(weight.codes, weight.scales, 4, 256, 64, weight.offsets)
    assert packed.size_bytes == 64 * 128 + 64 * 4 * (4 + 4)
    assert narrow_linear_triton.launch_narrow_linear(random(0, 256), packed).shape == (0, 64)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="of the interpreter")
def test_the_interpreters_product_and_sum_are_rounded_once() -> None:
    import numpy as np

    triton_interpreter = pytest.importorskip("triton_interpreter")
    # The product is half way between two numbers, and float64 loses what is added to it.
    x, z = np.float32([1 + 2.0**-12] * 3), np.float32([2.0**-60, 0, -(2.0**-60)])
    found = triton_interpreter.multiply_and_add(x, x, z)
    assert found.tolist() == [1 + 2.0**-11 + 2.0**-23, 1 + 2.0**-11, 1 + 2.0**-11]
