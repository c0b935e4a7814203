"""A step of attention for `quire bench kernels`: requests over blocks of a cache full of noise."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...ipc.spec.model_spec import AttentionSpec
from ...kernels.program.huge_pages import allocate_huge
from ...worker.attention.metadata import AttentionMetadata
from .kernel_case import Bench

_BLOCK_SIZE = 16  # tokens


def make_metadata(bench: Bench, query_lens: list[int], seq_lens: list[int]) -> AttentionMetadata:
    """Requests whose blocks are spread over the cache at random."""
    counts = [-(-length // _BLOCK_SIZE) for length in seq_lens]
    blocks = torch.randperm(sum(counts), dtype=torch.int32).split(counts)
    tables = torch.nn.utils.rnn.pad_sequence(list(blocks), batch_first=True)
    slots = [
        int(table[position // _BLOCK_SIZE]) * _BLOCK_SIZE + position % _BLOCK_SIZE
        for table, query_len, seq_len in zip(blocks, query_lens, seq_lens, strict=True)
        for position in range(seq_len - query_len, seq_len)
    ]
    starts = np.cumsum([0, *query_lens], dtype=np.int32)
    lengths = np.array(seq_lens, dtype=np.int32)
    return AttentionMetadata(
        query_starts=torch.from_numpy(starts).to(bench.device),
        seq_lens=torch.from_numpy(lengths).to(bench.device),
        block_tables=tables.to(bench.device),
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=bench.device),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        query_starts_host=starts,
        seq_lens_host=lengths,
    )


def make_cache(
    bench: Bench, spec: AttentionSpec, metadata: AttentionMetadata, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """K and V of a layer, full of noise: attention's speed does not depend on the layout of a block."""
    num_blocks = int((metadata.seq_lens + _BLOCK_SIZE - 1).div(_BLOCK_SIZE, rounding_mode="floor").sum())
    size = (num_blocks, spec.num_kv_heads, _BLOCK_SIZE, spec.head_size)
    return copy_cache((bench.noise(*size, dtype=dtype), bench.noise(*size, dtype=dtype)))


def copy_cache(cache: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The same in memory of its own; on a CPU in huge pages, as the worker has its cache."""
    key, value = cache
    return _copy(key), _copy(value)


def _copy(part: Tensor) -> Tensor:
    if part.device.type != "cpu":
        return part.clone()
    return allocate_huge(part.nbytes).view(part.dtype).view(part.shape).copy_(part)
