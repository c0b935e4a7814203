"""The narrow weight of a whole layer: projections of the same inputs stacked, and a rank's part of them.

`quantize` makes a plain weight narrow while it is read: `quantization` of EngineArgs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...ipc.errors import ModelError
from ...ipc.weight_format import WeightFormat
from ...kernels.choice import choose_kernel, native_library
from ...kernels.quantize_groups import launch_quantize_groups, quantize_groups_reference
from ..weights import Cut, WeightSource
from .integer_weight import IntegerWeight, NarrowWeight, ScaledFp8Weight, check_weight, stack_weights


def take_narrow_stacked(
    source: WeightSource,
    names: Sequence[str],
    formats: Sequence[WeightFormat | None],
    sizes: Sequence[int],
    width: int,
    cut: Cut,
    swaps_halves: bool = False,
) -> NarrowWeight:
    """The cut of several projections in one, [sum(sizes), width], in the formats that a checkpoint stores."""
    weights: list[NarrowWeight] = []
    for name, format, size in zip(names, formats, sizes, strict=True):
        if format is None or format.layout is None:
            text = "a format too: what is multiplied together lies in one layer"
            raise ModelError(name, "in the model's type" if format is None else "plain", text)
        weight = source.take_narrow(name, format, (size, width))
        check_weight(name, weight, format, size, width)
        weights.append(weight)
    stacked = cut_weight(names[0], stack_weights(list(names), weights), cut)
    if swaps_halves:
        half, rows = stacked.num_out // 2, stacked.num_out
        stacked = _take_rows(stacked, Cut((range(half, rows), range(half))))
    return stacked


def cut_weight(name: str, weight: NarrowWeight, cut: Cut) -> NarrowWeight:
    """A rank's part. ModelError where a cut along the inputs does not fall between groups."""
    if cut.rows is not None:
        weight = _take_rows(weight, cut)
    return weight if cut.columns is None else _take_columns(name, weight, cut.columns)


def _take_rows(weight: NarrowWeight, cut: Cut) -> NarrowWeight:
    def take(tensor: Tensor) -> Tensor:
        return torch.cat(Cut(cut.rows).find_pieces([tensor]))

    if isinstance(weight, ScaledFp8Weight):
        scales = weight.scales.repeat_interleave(weight.group_rows or weight.num_out, 0)[: weight.num_out]
        return replace(weight, values=take(weight.values), scales=take(scales), group_rows=1)
    offsets = None if weight.offsets is None else take(weight.offsets)
    return replace(weight, codes=take(weight.codes), scales=take(weight.scales), offsets=offsets)


def _take_columns(name: str, weight: NarrowWeight, columns: range) -> NarrowWeight:
    start, stop, num_in = columns.start, columns.stop, weight.num_in
    group = weight.group_size or num_in
    if isinstance(weight, IntegerWeight) and weight.permutation is not None:
        raise ModelError(name, "inputs in an order of their own", "another order, or tensor_parallel_size=1")
    unit = group if group != num_in else 2
    if start % unit or (stop % unit and stop != num_in):
        sizes = [size for size in range(1, num_in // unit + 1) if num_in % (size * unit) == 0]
        allowed = f"tensor_parallel_size one of {', '.join(map(str, sizes))}: what divides its groups"
        raise ModelError(name, f"{num_in} inputs in groups of {unit}", allowed)
    groups = slice(None) if group == num_in else slice(start // group, -(-stop // group))
    scales = weight.scales[:, groups].contiguous()
    size = weight.group_size
    if isinstance(weight, ScaledFp8Weight):
        return ScaledFp8Weight(weight.values[:, start:stop].contiguous(), scales, weight.group_rows, size)
    part = slice(start, stop) if weight.bits == 8 else slice(start // 2, -(-stop // 2))
    offsets = None if weight.offsets is None else weight.offsets[:, groups].contiguous()
    codes = weight.codes[:, part].contiguous()
    return replace(weight, codes=codes, scales=scales, offsets=offsets, num_in=stop - start)


_CHUNK_SIZE = 1 << 18  # numbers at a time: their float32 copies stay in the second-level cache
_MAX_INT8 = 127
_MAX_FP8 = 448.0


def quantize(weight: Tensor, format: WeightFormat) -> NarrowWeight:
    """The weight [N, K], of a floating point type, in an online format, on its device.

    A group of zeros has scale 1. What is not finite makes nan of its own group, or output, alone.
    """
    if format.bits == 4:
        codes, scales = _quantize_int4(weight, format.group_size)
        _spoil_groups(weight, scales, format.group_size)
        return IntegerWeight(codes, scales, 4, weight.shape[1], format.group_size)
    rows = max(1, _CHUNK_SIZE // weight.shape[1])
    quantize_rows = _quantize_fp8 if format.kind == "fp8" else _quantize_int8
    parts = [quantize_rows(part.float()) for part in weight.split(rows)]
    codes, scales = (torch.cat(each) for each in zip(*parts, strict=True))
    if format.kind == "fp8":
        return ScaledFp8Weight(codes, scales)
    return IntegerWeight(codes, scales, 8, weight.shape[1])


def _quantize_int4(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    if choose_kernel("quantize_groups", weight.dtype, weight.device) == "native":
        return launch_quantize_groups(native_library(), weight, group_size)
    return quantize_groups_reference(weight, group_size)


def _spoil_groups(weight: Tensor, scales: Tensor, group_size: int) -> None:
    """Make nan the scale of a group that holds what is not finite: it is 1 so far, as that of zeros is."""
    places = torch.arange(group_size, device=weight.device)
    for part in (scales == 1).nonzero().split(_CHUNK_SIZE // group_size):
        rows, groups = part.unbind(1)
        inputs = (groups.unsqueeze(1) * group_size + places).clamp_(max=weight.shape[1] - 1)
        is_spoilt = ~weight[rows.unsqueeze(1), inputs].isfinite().all(1)
        scales[rows[is_spoilt], groups[is_spoilt]] = torch.nan


def _quantize_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    scales = _find_scales(weight, _MAX_FP8)
    return (weight / scales).clamp_(-_MAX_FP8, _MAX_FP8).to(torch.float8_e4m3fn), scales


def _quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric: a number is off by at most half a scale, that is by max |row| / 254."""
    scales = _find_scales(weight, _MAX_INT8)
    # A division in float32 may end just above 127.
    return ((weight / scales).round_().clamp_(-_MAX_INT8, _MAX_INT8) + 128).to(torch.uint8), scales


def _find_scales(weight: Tensor, most: float) -> Tensor:
    scales = weight.abs().amax(1, keepdim=True) / most
    return torch.where(scales == 0, 1.0, scales)
