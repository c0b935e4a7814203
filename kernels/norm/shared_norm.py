"""Root mean square norm of rows that ranks have shared out, each some numbers of every row (rms_norm.py).

With `counts` this rank's squares are part of the sum: no rank before it has the same numbers.

Bytes: as rms_norm, and 4 a row that travel between the ranks.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ..group.shared_group import SharedGroup
from ..program.program import SharedNormTable


def shared_norm_reference(
    x: Tensor,
    group: SharedGroup,
    weight: Tensor,
    total_size: int,
    counts: bool,
    eps: float,
    weight_offset: float = 0.0,
    rounds_normed: bool = True,
) -> None:
    """Overwrite this rank's x [T, D] of rows of `total_size` numbers; on any device that the group's are.

    Raises as `SharedGroup.all_reduce`.
    """
    wide = x.float()
    squares = wide.pow(2).sum(-1, keepdim=True) if counts else wide.new_zeros((len(x), 1))
    group.all_reduce(squares)
    normed = wide * torch.rsqrt(squares / total_size + eps)
    if rounds_normed:
        normed = normed.to(x.dtype)
    x.copy_(normed * (weight_offset + weight.float()))


def launch_shared_norm(library: ctypes.CDLL, norm: SharedNormTable, group: SharedGroup, x: Tensor) -> None:
    """Overwrite this rank's x [T, D], float32 or bfloat16 on the CPU, some columns of a larger tensor.

    Raises as `SharedGroup.all_reduce`.
    """
    squares = torch.empty(len(x), dtype=torch.float32)
    is_bf16, address = x.dtype is torch.bfloat16, ctypes.addressof(norm)
    if library.quire_shared_norm(is_bf16, address, x, len(x), x.stride(0), squares):
        group.check()
