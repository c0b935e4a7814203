"""Makes a plain weight narrow while it is read: `quantization` of EngineArgs."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ipc.spec.weight_format import WeightFormat
from ...kernels.choice import choose_kernel, native_library
from ...kernels.linear.quantize_groups import launch_quantize_groups, quantize_groups_reference
from .integer_weight import IntegerWeight, NarrowWeight, ScaledFp8Weight

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
