"""Attention in plain torch operations: right on every device and in every type, fast on none."""

from __future__ import annotations

from torch import Tensor

from ...ipc.spec.model_spec import AttentionSpec
from ...kernels.attention.paged_attention import paged_attention_reference
from ...kernels.attention.rotate_and_write import rotate_and_write_reference
from .backend import AttentionBackend, count_ahead, value_size_of
from .metadata import AttentionMetadata, KVCache


class TorchAttention(AttentionBackend):
    """The backend that always works; see `AttentionBackend` for the contract."""

    name = "torch"

    def __init__(self, num_heads: int) -> None:
        super().__init__(num_heads, rotate_and_write_reference)

    def attend(
        self,
        query: Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        position_bias: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        attended = paged_attention_reference(
            query,
            *kv_cache,
            metadata.block_tables,
            metadata.query_starts_list(),
            metadata.seq_lens_list(),
            spec.window,
            spec.soft_cap,
            spec.scale,
            count_ahead(spec),
            position_bias,
            sinks,
            value_size_of(spec),
        )
        return attended.view(query.shape[0], -1)
