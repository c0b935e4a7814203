"""A weight as integers of some bits: scales by squared error, then rounding, to nearest or by GPTQ.

GPTQ: Frantar et al. 2022, arXiv:2210.17323. Legend: N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.linear.quantize_groups import CLIPS

_CHUNK_SIZE = 1 << 20  # numbers whose scales are chosen at a time
_BLOCK = 128  # inputs whose errors are spread at once over those that follow
_DAMPING = 0.01  # of the mean of the Gram matrix's diagonal, as in GPTQ's own code
_MAX_DAMPING = 10.0


@dataclass(frozen=True, slots=True)
class RoundedWeight:
    """value[n, k] = (codes[n, k] - 2^(bits - 1)) * scales[n, group of k]."""

    codes: Tensor  # uint8 [N, K]
    scales: Tensor  # [N, G], of the type that is stored
    bits: int
    group_size: int

    def dequantize(self) -> Tensor:
        """float32 [N, K]."""
        units = self.codes.float() - (1 << self.bits - 1)
        return units * self.scales.float().repeat_interleave(self.group_size, 1)


def choose_scales(weight: Tensor, bits: int, group_size: int, dtype: torch.dtype) -> Tensor:
    """Scales [N, G] of `dtype` for float32 [N, K], G * group_size = K.

    The number of a group with the largest magnitude, or a part of it, gets the lowest code, so a scale may be
    negative; of the parts that one is taken whose squared error is least. A group of zeros has scale 1.
    """
    rows = max(1, _CHUNK_SIZE // weight.shape[1])
    return torch.cat([_choose(part, bits, group_size, dtype) for part in weight.split(rows)])


def _choose(weight: Tensor, bits: int, group_size: int, dtype: torch.dtype) -> Tensor:
    lowest, groups = -(1 << bits - 1), weight.unflatten(1, (-1, group_size))
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    best, best_scales = torch.full_like(largest, torch.inf), torch.ones_like(largest)
    for clip in CLIPS:
        scales = (largest * clip / lowest).to(dtype).float()
        scales = torch.where(scales == 0, 1.0, scales)
        rounded = (groups / scales).round_().clamp_(lowest, -lowest - 1)
        error = (rounded * scales - groups).square_().sum(2, keepdim=True)
        is_better = error < best
        best, best_scales = torch.where(is_better, error, best), torch.where(is_better, scales, best_scales)
    return best_scales.squeeze(2).to(dtype)


def round_to_nearest(weight: Tensor, scales: Tensor, bits: int, group_size: int) -> RoundedWeight:
    """Each number of float32 [N, K] by itself."""
    middle = 1 << bits - 1
    units = weight / scales.float().repeat_interleave(group_size, 1)
    codes = (units.round_().clamp_(-middle, middle - 1) + middle).to(torch.uint8)
    return RoundedWeight(codes, scales, bits, group_size)


def round_by_gptq(
    weight: Tensor, scales: Tensor, factor: Tensor, order: Tensor, bits: int, group_size: int
) -> RoundedWeight:
    """float32 [N, K], input by input; what rounding one changes of the outputs, those after it make good.

    `factor` and `order` are `factor_gram`'s. Scales are fixed before, so whatever the order a group's inputs
    stay side by side.
    """
    middle, num_in = 1 << bits - 1, weight.shape[1]
    left, codes = weight[:, order], torch.empty(weight.shape, dtype=torch.uint8)
    spread = scales.float().index_select(1, order // group_size)
    for start in range(0, num_in, _BLOCK):
        end = min(start + _BLOCK, num_in)
        block, errors = left[:, start:end].T.contiguous(), torch.empty(end - start, len(weight))
        part = factor[start:end, start:end]
        for index in range(end - start):
            scale, column = spread[:, start + index], block[index]
            units = (column / scale).round_().clamp_(-middle, middle - 1)
            codes[:, start + index] = (units + middle).to(torch.uint8)
            errors[index] = (column - units * scale) / part[index, index]
            block[index + 1 :].addr_(part[index, index + 1 :], errors[index], alpha=-1)
        left[:, end:].addmm_(errors.T, factor[start:end, end:], alpha=-1)
    out = torch.empty_like(codes)
    out[:, order] = codes
    return RoundedWeight(out, scales, bits, group_size)


def factor_gram(gram: Tensor, act_order: bool) -> tuple[Tensor, Tensor]:
    """What GPTQ needs of the Gram matrix X^T X of a layer's inputs, float32 [K, K].

    (the upper Cholesky factor of its inverse, the order in which inputs are rounded: with `act_order` those
    of the largest magnitude first). An input that is always 0 depends on no other and is rounded to nearest.
    """
    diagonal = gram.diagonal().clone()
    mean = diagonal.mean().clamp(min=torch.finfo(torch.float32).tiny)
    order = torch.arange(len(gram))
    if act_order:
        order = diagonal.argsort(descending=True, stable=True)
    ordered = gram[order][:, order]
    damping = _DAMPING
    while damping <= _MAX_DAMPING:
        damped = ordered + torch.eye(len(gram)) * (damping * mean)
        damping *= 10
        lower, failed = torch.linalg.cholesky_ex(damped)
        if failed:
            continue
        upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not failed and bool(torch.isfinite(upper).all()):
            return upper, order
    return torch.eye(len(gram)), order  # inputs that are not finite, or say nothing: to nearest
