"""Pools of hidden states in float32, a row of them for each row of requests, continued chunk by chunk.

cls: x_0. last: x_{n-1}. mean, mean_sqrt_len: the sum of x_p, to be divided by `find_divisors`.
weighted_mean: the sum of (p + 1) x_p. max: the greatest. p is a position in the prompt, n how many there are.
A number of a pool is one chain of float32 operations over p, so chunks and neighbours change no bit.
Bytes: reads the hidden states once for each pool.
Legend: T tokens and R rows of the step, N rows in all, K pools, H hidden size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# In the order of the enum in pool_rows.cpp.
POOLS = ("cls", "last", "mean", "max", "weighted_mean", "mean_sqrt_len")

Int64s = NDArray[np.int64]


def pool_rows_reference(
    hidden: Tensor, rows: Int64s, starts: Int64s, firsts: Int64s, kinds: Sequence[str], pools: Tensor
) -> None:
    """Take the tokens [starts[r], starts[r + 1]) of `hidden` [T, H], which are those of row `rows[r]` from
    position `firsts[r]` on, into `pools` float32 [N, K, H]. `rows`, `firsts` [R], `starts` [R + 1].
    """
    states, out = hidden.float().numpy(), pools.numpy()
    for place, row in enumerate(rows.tolist()):
        start, end, first = int(starts[place]), int(starts[place + 1]), int(firsts[place])
        for k, kind in enumerate(kinds):
            for t in range(end - 1 if kind == "last" else start, end):
                _take_token(kind, states[t], out[row, k], first + t - start)


def _take_token(kind: str, x: NDArray[np.float32], pool: NDArray[np.float32], position: int) -> None:
    if kind == "last" or position == 0:
        pool[:] = x
    elif kind == "max":
        np.maximum(pool, x, out=pool)
    elif kind != "cls":
        pool += np.float32(position + 1) * x if kind == "weighted_mean" else x


def launch_pool_rows(
    library: ctypes.CDLL,
    hidden: Tensor,
    rows: Int64s,
    starts: Int64s,
    firsts: Int64s,
    kinds: Sequence[str],
    pools: Tensor,
) -> None:
    """The same for contiguous float32 or bfloat16 on the CPU."""
    numbers = np.array([POOLS.index(kind) for kind in kinds], dtype=np.int32)
    is_bf16, size = hidden.dtype is torch.bfloat16, hidden.shape[1]
    library.quire_pool_rows(
        is_bf16, hidden, size, len(rows), rows, starts, firsts, len(kinds), numbers, pools
    )


def find_divisors(kinds: Sequence[str], num_tokens: Int64s) -> NDArray[np.float32]:
    """float32 [R, K]: what the pools of whole prompts of so many tokens are divided by."""
    n = num_tokens.astype(np.float64)
    divisors = np.ones((len(n), len(kinds)), dtype=np.float32)
    for k, kind in enumerate(kinds):
        if kind == "mean":
            divisors[:, k] = n
        elif kind == "weighted_mean":
            divisors[:, k] = n * (n + 1) / 2
        elif kind == "mean_sqrt_len":
            divisors[:, k] = np.sqrt(n)
    return divisors
