"""Attention by the Triton kernels. Queries travel inside qkv; blocks lie as the torch reference has them."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from ...ipc.model_spec import AttentionSpec
from ...kernels.paged_attention_triton import AttentionPlan, launch_paged_attention, plan_attention
from ...kernels.rotate_and_write_triton import launch_rotate_and_write
from .backend import AttentionBackend, count_ahead
from .metadata import AttentionMetadata, KVCache


class TritonAttention(AttentionBackend):
    """See `AttentionBackend`. `is_strict` makes a row's bits depend on its sequence alone.

    A plan follows from the number of requests and the bound on their lengths, and the kernels read the rest
    on the device: a step can be captured into a graph. Elsewhere the metadata's host copies spare a transfer.
    """

    is_capturable = captures_chunks = True

    def __init__(self, num_heads: int, num_processors: int, is_strict: bool = False) -> None:
        super().__init__(num_heads, launch_rotate_and_write)
        self._num_processors = num_processors
        self.is_exact = is_strict
        self._planned: tuple[AttentionMetadata, AttentionPlan] | None = None

    def attend(
        self,
        query: Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        position_bias: Tensor | None = None,
    ) -> Tensor:
        return launch_paged_attention(
            query,
            query.shape[1],
            self._num_heads,
            *kv_cache,
            metadata.block_tables,
            metadata.query_starts,
            metadata.seq_lens,
            spec.window,
            self._plan(metadata, kv_cache[0].shape[1]),
            spec.soft_cap,
            spec.scale,
            count_ahead(spec),
            position_bias,
        )

    def _plan(self, metadata: AttentionMetadata, num_kv_heads: int) -> AttentionPlan:
        """Made in the step's first layer, kept for the others."""
        if self._planned is None or self._planned[0] is not metadata:
            plan = plan_attention(
                *(metadata.kind_bounds or _count_kinds(metadata)),
                num_kv_heads,
                metadata.max_seq_len,
                self._num_processors,
                self.is_exact,
            )
            self._planned = metadata, plan
        return self._planned[1]


def _count_kinds(metadata: AttentionMetadata) -> tuple[int, int]:
    """Requests with one token in this step, and with more."""
    if metadata.max_query_len == 1:
        return metadata.num_requests, 0
    starts = metadata.query_starts_list()
    num_singles = sum(end - start == 1 for start, end in pairwise(starts))
    return num_singles, metadata.num_requests - num_singles


def count_processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 1 where the interpreter stands in for one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
