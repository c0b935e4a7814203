"""A linear layer for each head by itself, y[t, h] = x[t, h] W_h^T: latent attention absorbs W_uk and W_uv so.

Bytes: the heads' weights once for each 64 tokens. Legend: T tokens, H heads, K inputs, N outputs.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ..program.program import LinearTable


def multiply_heads_reference(x: Tensor, weight: Tensor) -> Tensor:
    """[T, H, N] of x [T, H, K] and the weights [H, N, K]; the products are added up in float32."""
    return torch.einsum("thk,hnk->thn", x.float(), weight.float()).to(x.dtype)


def launch_multiply_heads(
    library: ctypes.CDLL, x: Tensor, layers: ctypes.Array[LinearTable], y: Tensor
) -> None:
    """The same on the CPU into y, bits of a row independent of the others.

    The first K and N numbers of each head of x and y [T, H, .] are meant, whose last dimension is contiguous.
    """
    assert x.stride(2) == y.stride(2) == 1
    library.quire_multiply_heads(
        *(layers, len(layers), x.dtype is torch.bfloat16, x.data_ptr(), x.stride(0), x.stride(1), len(x)),
        *(y.data_ptr(), y.stride(0), y.stride(1)),
    )
