"""What heads add to scores by the distance of key and query, from a table of buckets."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...kernels.paged_attention import pack_position_bias


def make_position_bias(table: Tensor, max_distance: int, max_model_len: int) -> Tensor:
    """float32 [H, 2 L - 1] by key less query, as kernels take it, from a table [buckets, H].

    The buckets are T5's for attention both ways (arXiv 1910.10683, 2.1): half of them for keys after the
    query, small distances one by one, larger ones by their logarithm up to `max_distance`.
    """
    num_buckets = table.shape[0] // 2
    num_exact = num_buckets // 2
    distances = torch.arange(1 - max_model_len, max_model_len)
    sizes = distances.abs()
    growth = torch.log(sizes.clamp(min=1).float() / num_exact) / math.log(max_distance / num_exact)
    large = num_exact + (growth * (num_buckets - num_exact)).long()
    buckets = torch.where(sizes < num_exact, sizes, large.clamp(max=num_buckets - 1))
    buckets += (distances > 0) * num_buckets
    return pack_position_bias(table.float()[buckets.to(table.device)].t().contiguous())
