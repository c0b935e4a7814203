"""Root mean square norm of rows that ranks have shared out, each some numbers of every row (rms_norm.py).

Bytes: as rms_norm, and 4 a row that travel between the ranks.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from .program import SharedNormTable
from .shared_group import SharedGroup


def launch_shared_norm(library: ctypes.CDLL, norm: SharedNormTable, group: SharedGroup, x: Tensor) -> None:
    """Overwrite this rank's x [T, D], float32 or bfloat16 on the CPU, some columns of a larger tensor.

    Raises as `SharedGroup.all_reduce`.
    """
    squares = torch.empty(len(x), dtype=torch.float32)
    is_bf16, address = x.dtype is torch.bfloat16, ctypes.addressof(norm)
    if library.quire_shared_norm(is_bf16, address, x.data_ptr(), len(x), x.stride(0), squares.data_ptr()):
        group.check()
