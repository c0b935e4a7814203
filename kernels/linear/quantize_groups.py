"""A weight [N, K] as 4-bit codes in groups along K: (code - 8) * scale is about the number.

In each group the number with the largest magnitude, or the `clip` part of it, has code 0, that is -8; of the
clips the one whose squared error is least is taken, the first of equals: a smaller scale clips the largest
numbers and rounds the others finer. A group of zeros has scale 1.
Legend: G groups of an output, the last one may be shorter.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor
from torch.nn import functional as F

CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65)
_CHUNK_SIZE = 1 << 18  # numbers at a time: their float32 copies stay in the second-level cache


def quantize_groups_reference(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """(codes uint8 [N, ceil(K / 2)], the even k in the low half; scales bfloat16 [N, G])."""
    rows = max(1, _CHUNK_SIZE // weight.shape[1])
    parts = [_quantize_rows(part.float(), group_size) for part in weight.split(rows)]
    return torch.cat([codes for codes, _ in parts]), torch.cat([scales for _, scales in parts])


def _quantize_rows(weight: Tensor, size: int) -> tuple[Tensor, Tensor]:
    num_out, num_in = weight.shape
    groups = F.pad(weight, (0, -num_in % size)).view(num_out, -1, size)
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    best, best_scales = torch.full_like(largest, torch.inf), torch.ones_like(largest)
    for clip in CLIPS:
        scales = (largest * clip / -8).bfloat16().float()
        scales = torch.where(scales == 0, 1.0, scales)
        error = (_divide(groups, scales) * scales - groups).square_().sum(2, keepdim=True)
        is_better = error < best
        best = torch.where(is_better, error, best)
        best_scales = torch.where(is_better, scales, best_scales)
    codes = (_divide(groups, best_scales) + 8).to(torch.uint8).view(num_out, -1)[:, :num_in]
    codes = F.pad(codes, (0, num_in % 2))
    return codes[:, 0::2] | codes[:, 1::2] << 4, best_scales.squeeze(2).bfloat16()


def _divide(groups: Tensor, scales: Tensor) -> Tensor:
    return (groups / scales).round_().clamp_(-8, 7)


def launch_quantize_groups(library: ctypes.CDLL, weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """The same on the CPU, of float32 or bfloat16, by all threads; errors are added in another order."""
    weight = weight.contiguous()
    num_out, num_in = weight.shape
    codes = torch.empty((num_out, -(-num_in // 2)), dtype=torch.uint8)
    scales = torch.empty((num_out, -(-num_in // group_size)), dtype=torch.bfloat16)
    is_bf16, clips = weight.dtype is torch.bfloat16, torch.tensor(CLIPS)
    library.quire_quantize_groups(
        is_bf16, weight, num_out, num_in, group_size, clips, len(CLIPS), codes, scales
    )
    return codes, scales
