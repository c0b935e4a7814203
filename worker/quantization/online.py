"""A plain weight made narrow while it is read: `quantization` of EngineArgs.

int8 and fp8 take a scale an output, by its largest magnitude. int4 takes one a group, at which the group's
squared error is least among CLIPS: a smaller scale clips the largest numbers and rounds the others finer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...ipc.weight_format import WeightFormat
from .integer_weight import IntegerWeight, NarrowWeight, ScaledFp8Weight, pack_nibbles

# Of the number whose magnitude is the largest, which has code 0: the part of it that code 0 stands for.
CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65)
_CHUNK_SIZE = 1 << 18  # numbers at a time: their float32 copies stay in the second-level cache
_MAX_FP8 = 448.0


def quantize(weight: Tensor, format: WeightFormat) -> NarrowWeight:
    """The weight [N, K], of a floating point type, in an online format, on its device.

    A group of zeros has scale 1. A NaN or an infinity makes its group's scale one.
    """
    rows = max(1, _CHUNK_SIZE // weight.shape[1])
    make = _quantize_fp8 if format.kind == "fp8" else _quantize_int8 if format.bits == 8 else _quantize_int4
    parts = [make(part.float(), format) for part in weight.split(rows)]
    codes, scales = (torch.cat(each) for each in zip(*parts, strict=True))
    if format.kind == "fp8":
        return ScaledFp8Weight(codes, scales)
    return IntegerWeight(codes, scales, format.bits, weight.shape[1], format.group_size)


def _quantize_fp8(weight: Tensor, _: WeightFormat) -> tuple[Tensor, Tensor]:
    scales = _unless_zero(weight.abs().amax(1, keepdim=True) / _MAX_FP8)
    return (weight / scales).clamp_(-_MAX_FP8, _MAX_FP8).to(torch.float8_e4m3fn), scales


def _quantize_int8(weight: Tensor, _: WeightFormat) -> tuple[Tensor, Tensor]:
    """Symmetric: a number is off by at most half a scale, that is by max |row| / 254."""
    scales = _unless_zero(weight.abs().amax(1, keepdim=True) / 127)
    return ((weight / scales).round_().clamp_(-127, 127) + 128).to(torch.uint8), scales


def _quantize_int4(weight: Tensor, format: WeightFormat) -> tuple[Tensor, Tensor]:
    """Of each group the number with the largest magnitude, or what is left of it, has code 0, that is -8."""
    num_out, num_in = weight.shape
    size = format.group_size or num_in
    padded = torch.nn.functional.pad(weight, (0, -num_in % size)).view(num_out, -1, size)
    largest = padded.gather(2, padded.abs().argmax(2, keepdim=True))
    best = torch.full_like(largest, torch.inf)
    best_scales, best_codes = torch.ones_like(largest), torch.full_like(padded, 8, dtype=torch.uint8)
    for clip in CLIPS:
        scales = _unless_zero((largest * clip / -8).bfloat16().float())
        codes = (padded / scales).round_().clamp_(-8, 7)
        error = (codes * scales - padded).square_().sum(2, keepdim=True)
        is_better = error < best
        best = torch.where(is_better, error, best)
        best_scales = torch.where(is_better, scales, best_scales)
        best_codes = torch.where(is_better, (codes + 8).to(torch.uint8), best_codes)
    codes = best_codes.view(num_out, -1)[:, :num_in]
    return pack_nibbles(codes), best_scales.squeeze(2).bfloat16()


def _unless_zero(scales: Tensor) -> Tensor:
    return torch.where(scales == 0, 1.0, scales)
