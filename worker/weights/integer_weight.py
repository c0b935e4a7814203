"""IntegerWeight and ScaledFp8Weight: the two forms in which narrow weights reach a linear layer.

Readers of checkpoints and the quantizers make them; kernels pack them. They know no file and no model.
Legend: N outputs, K inputs, G groups of inputs of an output.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...ipc.errors import ModelError
from ...ipc.spec.weight_format import WeightFormat
from .finite import check_finite


@dataclass(frozen=True, slots=True)
class IntegerWeight:
    """A weight [N, K]: value[n, permutation[k]] = (codes[n, k] - 2^(bits - 1)) * scales[n, k // group_size].

    With offsets it is codes * scales - offsets, with a codebook codebook[codes] * scales (- offsets); each
    rounded once, to float32. Formats of 2, 3, 5 and 6 bits take the codes of 4 or 8.
    """

    codes: Tensor  # uint8 [N, K]; of 4 bits [N, ceil(K / 2)], the even k in the low half of a byte
    scales: Tensor  # float32 or bfloat16 [N, G]
    bits: int
    num_in: int  # K
    group_size: int = 0  # 0: one group, all of K; else a multiple of 16, and the last group may be shorter
    offsets: Tensor | None = None  # float32 [N, G]; of a whole zero point z it is z * scale
    permutation: Tensor | None = None  # int32 [K]: the input that each column of codes belongs to
    codebook: Tensor | None = None  # float32 [16], of 4 bits

    @property
    def num_out(self) -> int:
        """N."""
        return self.codes.shape[0]

    @property
    def group(self) -> int:
        """Inputs of a group, where 0 has become all of them."""
        return self.group_size or self.num_in


@dataclass(frozen=True, slots=True)
class ScaledFp8Weight:
    """A weight [N, K]: value = values * scale of the block of group_rows by group_size that it lies in."""

    values: Tensor  # float8_e4m3fn [N, K]
    scales: Tensor  # float32 [row blocks, column blocks]
    group_rows: int = 1  # 0: all of N
    group_size: int = 0  # 0: all of K

    @property
    def num_out(self) -> int:
        """N."""
        return self.values.shape[0]

    @property
    def num_in(self) -> int:
        """K."""
        return self.values.shape[1]


NarrowWeight = IntegerWeight | ScaledFp8Weight


def count_tensor_bytes(weight: NarrowWeight) -> int:
    """Bytes that its tensors hold."""
    if isinstance(weight, ScaledFp8Weight):
        return weight.values.nbytes + weight.scales.nbytes
    parts = weight.codes, weight.scales, weight.offsets, weight.permutation, weight.codebook
    return sum(part.nbytes for part in parts if part is not None)


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 [N, K] below 16 as [N, ceil(K / 2)], the even k in the low half of a byte."""
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    pairs = codes.contiguous().view(torch.int16)  # three times as fast as two strided halves
    return (pairs | pairs >> 4).to(torch.uint8)


def unpack_nibbles(packed: Tensor, num_in: int) -> Tensor:
    """The reverse of `pack_nibbles`."""
    return torch.stack((packed & 15, packed >> 4), dim=2).flatten(1)[:, :num_in]


def unpack_codes(weight: IntegerWeight) -> Tensor:
    """Its codes as uint8 [N, K], in the order in which they are stored."""
    return weight.codes if weight.bits == 8 else unpack_nibbles(weight.codes, weight.num_in)


def spread_scales(scales: Tensor, num_out: int, num_in: int, group_rows: int, group_size: int) -> Tensor:
    """Numbers of groups [row blocks, column blocks] as [N, K]; a size of 0 stands for all."""
    rows = scales.repeat_interleave(group_rows or num_out, 0)[:num_out]
    return rows.repeat_interleave(group_size or num_in, 1)[:, :num_in]


def dequantize(weight: NarrowWeight) -> Tensor:
    """float32 [N, K] of what a narrow weight stands for: the reference of kernels and readers."""
    num_out, num_in = weight.num_out, weight.num_in
    if isinstance(weight, ScaledFp8Weight):
        scales = spread_scales(weight.scales.float(), num_out, num_in, weight.group_rows, weight.group_size)
        return weight.values.float() * scales

    def spread(numbers: Tensor) -> Tensor:  # in float64 a product is exact, so that there is one rounding
        return spread_scales(numbers.double(), num_out, num_in, 1, weight.group_size)

    codes = unpack_codes(weight)
    if weight.codebook is not None:
        units = weight.codebook.double()[codes.int()]
    else:
        units = codes.double() - (0 if weight.offsets is not None else 1 << weight.bits - 1)
    values = units * spread(weight.scales)
    if weight.offsets is not None:
        values -= spread(weight.offsets)
    if weight.permutation is None:
        return values.float()
    out = torch.empty_like(values, dtype=torch.float32)
    out[:, weight.permutation.long()] = values.float()
    return out


def check_weight(name: str, weight: NarrowWeight, format: WeightFormat, num_out: int, num_in: int) -> None:
    """ModelError unless a reader has made what the format says of a weight [num_out, num_in]."""
    shape = (weight.num_out, weight.num_in)
    if shape != (num_out, num_in):
        raise ModelError(name, list(shape), f"the shape {[num_out, num_in]}, which config.json calls for")
    groups = format.count_groups(num_in)
    check_finite(f"{name} scales", weight.scales)
    if isinstance(weight, ScaledFp8Weight):
        rows = -(-num_out // (weight.group_rows or num_out))
        columns = -(-num_in // (weight.group_size or num_in))
        _check_shape(f"{name} scales", weight.scales, (rows, columns))
        _check_fp8_numbers(name, weight.values)
        return
    width = num_in if weight.bits == 8 else -(-num_in // 2)
    _check_shape(f"{name} codes", weight.codes, (num_out, width))
    _check_shape(f"{name} scales", weight.scales, (num_out, groups))
    if weight.offsets is not None:
        _check_shape(f"{name} offsets", weight.offsets, (num_out, groups))
        check_finite(f"{name} offsets", weight.offsets)
    if weight.permutation is not None:
        _check_shape(f"{name} permutation", weight.permutation, (num_in,))
        order = weight.permutation.sort().values
        if not torch.equal(order, torch.arange(num_in, dtype=order.dtype)):
            raise ModelError(f"{name} permutation", "with repeats or gaps", f"each of 0 to {num_in - 1} once")


def _check_fp8_numbers(name: str, values: Tensor) -> None:
    """The two codes of nan, 0x7f and 0xff, are the largest int8 and uint8; kernels read them as 480."""
    codes = values.contiguous().view(torch.uint8)
    if codes.numel() and (int(codes.view(torch.int8).max()) == 0x7F or int(codes.max()) == 0xFF):
        raise ModelError(f"{name} values", "nan", "float8_e4m3fn numbers from -448 to 448")


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ModelError(name, list(tensor.shape), f"the shape {list(shape)}")


def stack_weights(names: list[str], weights: list[NarrowWeight]) -> NarrowWeight:
    """Several weights of the same inputs as one, in their order.

    Integer ones may differ in bits, groups and offsets: all take the widest form that one needs. ModelError
    names two that cannot lie in one layer.
    """
    first = weights[0]
    if len(weights) == 1:
        return first
    if all(isinstance(each, ScaledFp8Weight) for each in weights):
        return _stack_fp8([each for each in weights if isinstance(each, ScaledFp8Weight)])
    integers = [each for each in weights if isinstance(each, IntegerWeight)]
    for name, each in zip(names, weights, strict=True):
        if not isinstance(each, IntegerWeight) or not isinstance(first, IntegerWeight):
            raise ModelError(name, type(each).__name__, f"{type(first).__name__}, as {names[0]}")
        for part in ("permutation", "codebook"):
            if not _is_same(getattr(each, part), getattr(first, part)):
                raise ModelError(
                    f"{name} {part}", "another one", f"that of {names[0]}, which has the same inputs"
                )
    return _stack_integers(integers)


def _is_same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _stack_fp8(weights: list[ScaledFp8Weight]) -> ScaledFp8Weight:
    """With a scale an output and block of columns."""
    size = min(each.group_size or each.num_in for each in weights)
    groups = -(-weights[0].num_in // size)
    scales = [
        each.scales.repeat_interleave(each.group_rows or each.num_out, 0)[: each.num_out]
        .repeat_interleave((each.group_size or each.num_in) // size or 1, 1)[:, :groups]
        for each in weights
    ]  # fmt: skip
    return ScaledFp8Weight(torch.cat([each.values for each in weights]), torch.cat(scales), 1, size)


def _stack_integers(weights: list[IntegerWeight]) -> IntegerWeight:
    first = weights[0]
    bits = max(each.bits for each in weights)
    group = min(each.group for each in weights)
    has_offsets = (
        any(each.offsets is not None for each in weights) or len({each.bits for each in weights}) > 1
    )
    same = [_widen(each, bits, group, has_offsets) for each in weights]
    dtypes = {each.scales.dtype for each in same}
    scales = [each.scales if len(dtypes) == 1 else each.scales.float() for each in same]
    offsets = [each.offsets for each in same if each.offsets is not None]
    return replace(
        first,
        codes=torch.cat([each.codes for each in same]),
        scales=torch.cat(scales),
        bits=bits,
        group_size=0 if group == first.num_in else group,
        offsets=torch.cat(offsets) if has_offsets else None,
    )


def _widen(weight: IntegerWeight, bits: int, group: int, has_offsets: bool) -> IntegerWeight:
    """The same numbers with so many bits, with groups whose size divides its own, and with offsets."""
    codes = weight.codes if weight.bits == bits else unpack_codes(weight)
    if weight.group % group and weight.group != weight.num_in:
        raise ModelError("group_size", weight.group, f"a multiple of {group}, as beside it")
    groups, repeats = -(-weight.num_in // group), -(-weight.group // group)
    scales = weight.scales.repeat_interleave(repeats, 1)[:, :groups]
    offsets = weight.offsets
    if offsets is None and has_offsets:
        middle = 0 if weight.codebook is not None else 1 << weight.bits - 1
        offsets = weight.scales.float() * middle
    if offsets is not None:
        offsets = offsets.repeat_interleave(repeats, 1)[:, :groups]
    return replace(weight, codes=codes, scales=scales, bits=bits, group_size=group, offsets=offsets)
