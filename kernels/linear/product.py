"""x *= act(y), number by number; act is none or one of GATES.

Bytes: reads both once, writes x once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

# As QuireGate numbers them.
GATES = {None: 0, "sigmoid": 1, "silu": 2}
_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"sigmoid": torch.sigmoid, "silu": F.silu}


def product_reference(x: Tensor, y: Tensor, gate: str | None) -> Tensor:
    """x * act(y), both [T, N]; computed in float32, rounded once."""
    wide = y.to(torch.promote_types(y.dtype, torch.float32))
    return (x * (wide if gate is None else _FUNCTIONS[gate](wide))).to(x.dtype)


def launch_product(library: ctypes.CDLL, x: Tensor, y: Tensor, gate: str | None) -> Tensor:
    """The same in place, of a contiguous x on the CPU; columns of y are neighbours."""
    is_bf16 = x.dtype is torch.bfloat16
    library.quire_product(is_bf16, GATES[gate], x, *x.shape, y, y.stride(0))
    return x
