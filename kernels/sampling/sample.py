"""Sampling on the CPU: one token a row, in one native call.

A weight is exp((logit - largest) / temperature), in float32. min-p, top-k and top-p, in this order, are
thresholds on it: equal weights stay together. The token is the noise's quantile of what is left, in the order
of ids; sums are float32 within blocks of 128 tokens, float64 over blocks. The torch path
(worker/sampling/sampler.py) rounds some weights otherwise: the same noise then gives another token in about
one draw of a million.
Bytes: the logits once from memory, once more from the cache. Legend: S rows, V vocabulary.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def launch_sample(
    library: ctypes.CDLL,
    logits: Tensor,
    temperature: NDArray[np.float32],
    top_k: NDArray[np.int64],
    top_p: NDArray[np.float64],
    min_p: NDArray[np.float32],
    noise: NDArray[np.float64],
    masks: NDArray[np.int64] | None = None,
) -> tuple[Tensor, Tensor]:
    """(token ids int64 [S], largest logits float32 [S]) for contiguous float32 logits [S, V] on the CPU.

    The columns are contiguous [S]; top_k is V and top_p 1 where they are off. A row whose largest logit is
    not finite gets its place; of a row with NaN that is the first NaN. `masks`: addresses of the rows' masks
    (token_bitmask.py), 0 for none: as if the mask had been applied first, but only what it allows is read.
    """
    num_rows, size = logits.shape
    token_ids = torch.empty(num_rows, dtype=torch.int64)
    top = torch.empty(num_rows, dtype=torch.float32)
    columns = (temperature, top_k, top_p, min_p, noise)
    addresses = [column.ctypes.data for column in columns]
    addresses.append(0 if masks is None else masks.ctypes.data)
    library.quire_sample(logits.data_ptr(), num_rows, size, *addresses, token_ids.data_ptr(), top.data_ptr())
    return token_ids, top
