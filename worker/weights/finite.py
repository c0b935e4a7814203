"""Numbers of weights that are not finite: one may spoil every answer, so a model with any does not start."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...ipc.errors import ModelError

_CHUNK = 1 << 18  # numbers
# As integers, and the bits of infinity: those of nan are larger.
_BITS = {
    torch.bfloat16: (torch.int16, np.uint16, 0x7F80),
    torch.float16: (torch.int16, np.uint16, 0x7C00),
    torch.float32: (torch.int32, np.uint32, 0x7F800000),
}


def check_finite(name: str, numbers: Tensor) -> Tensor:
    """Return the numbers of a tensor. Raises ModelError where one of them is not finite."""
    if is_finite(numbers):
        return numbers
    is_bad = ~numbers.isfinite()
    allowed = f"finite numbers; {int(is_bad.sum())} of {numbers.numel()} are not"
    if numbers.dtype == torch.float16:
        allowed += " in float16, which ends at 65504: dtype='bfloat16' or 'float32' may do"
    raise ModelError(name, float(numbers[is_bad][0]), allowed)


def is_finite(numbers: Tensor) -> bool:
    """Whether all are. On a CPU by their bits, chunk by chunk in its cache, on this thread alone: 14 GB/s of
    processor time (two busy cores, load 15), where torch's isfinite had 0.1 of wall time.
    """
    if numbers.device.type != "cpu" or not numbers.is_contiguous() or numbers.dtype not in _BITS:
        return bool(numbers.isfinite().all())
    signed, unsigned, infinity = _BITS[numbers.dtype]
    bits = numbers.view(-1).view(signed).numpy()
    negative = infinity - np.iinfo(bits.dtype).min
    return all(
        part.max() < infinity and part.view(unsigned).max() < negative
        for part in np.split(bits, range(_CHUNK, len(bits), _CHUNK))
        if len(part)
    )
