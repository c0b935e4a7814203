"""int8 weights with one scale an output channel: y = (x q^T) scales + b, where W is about scales * q.

Symmetric, in -127 .. 127, rounded to the nearest: an entry of W is off by at most half a scale, that is by
max |row| / 254. The kernels are those of linear.py and linear_triton.py. Activations keep their numbers, but
for AMX, which takes a row as multiples of 2^-22 of its magnitude: three bytes each, so that weights are
multiplied as they lie in memory. Of few rows reading is the bound (at one 1.65 times as fast as bfloat16), of
many the products, three for bfloat16's two (0.73 times).
Legend: x [m, K], q [N, K], scales and b [N].
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

MAX_INT8 = 127
_CHUNK_SIZE = 1 << 18  # numbers of a weight at a time: their float32 copies stay in the second-level cache


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(q int8 [N, K], scales float32 [N]) of a floating point weight [N, K], on its device.

    A row of zeros has scale 1.
    """
    num_out, num_in = weight.shape
    quantized = torch.empty((num_out, num_in), dtype=torch.int8, device=weight.device)
    scales = torch.empty(num_out, dtype=torch.float32, device=weight.device)
    rows = max(1, _CHUNK_SIZE // num_in) if weight.device.type == "cpu" else num_out
    for start in range(0, num_out, rows):
        part = weight[start : start + rows].float()
        largest = torch.maximum(part.amax(dim=1), -part.amin(dim=1))
        scale = torch.where(largest > 0, largest / MAX_INT8, 1.0)
        scales[start : start + rows] = scale
        # A division in float32 may end just above 127.
        rounded = (part / scale.unsqueeze(1)).round_().clamp_(-MAX_INT8, MAX_INT8)
        quantized[start : start + rows] = rounded
    return quantized, scales


def linear_int8_reference(x: Tensor, quantized: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """y [m, N] of x's type."""
    y = F.linear(x, quantized.to(x.dtype)).float() * scales
    return (y if bias is None else y + bias.float()).to(x.dtype)
