"""Attention of whole prompts that see both ways, from where the projection left queries, keys and values.

For a query at position p of its prompt: softmax over j of (q . k_j * scale) times v_j, with j less than
`window` away from p; scale, soft cap and position bias as in paged_attention.py, whose reference is this
kernel's too.
Nothing is written to a cache. Bytes: qkv is read and the result written once.
Legend: T tokens, H query heads, G kv heads (H / G queries share one), D head size.
"""

from __future__ import annotations

import ctypes

from torch import Tensor

from .paged_attention import NO_WINDOW, default_scale


def launch_encoder_attention(
    library: ctypes.CDLL,
    qkv: Tensor,
    num_heads: int,
    num_kv_heads: int,
    query_starts: Tensor,
    window: int | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    position_bias: Tensor | None = None,
) -> Tensor:
    """[T, H * D] of qkv [T, (H + 2 G) D], on the CPU.

    Prompt r owns tokens query_starts[r] to query_starts[r + 1] - 1.
    float32 or bfloat16, D a multiple of 8 up to 256; query_starts is int32 [R + 1], `position_bias` as
    `pack_position_bias` makes it. A row's bits depend on its own prompt alone.
    """
    num_tokens = len(qkv)
    head_size = qkv.shape[1] // (num_heads + 2 * num_kv_heads)
    out = qkv.new_empty((num_tokens, num_heads * head_size))
    reach = 0 if position_bias is None else position_bias.shape[1] // 2
    library.quire_encoder_attention(
        *(qkv.dtype.itemsize == 2, qkv, out, query_starts, len(query_starts) - 1, 0, num_tokens),
        *(position_bias, num_heads, num_kv_heads, head_size, NO_WINDOW if window is None else window, reach),
        *(scale or default_scale(head_size), soft_cap or 0.0),
    )
    return out
