"""Attention by the C++ kernels, which read blocks, or qkv both ways, in place.

A row depends on its own sequence alone.
"""

from __future__ import annotations

import ctypes
from functools import partial

from torch import Tensor

from ...ipc.spec.model_spec import AttentionSpec
from ...kernels.attention.encoder_attention import launch_encoder_attention
from ...kernels.attention.paged_attention import launch_paged_attention
from ...kernels.attention.rotate_and_write import launch_rotate_and_write, launch_rotate_latent
from .backend import AttentionBackend, value_size_of
from .metadata import AttentionMetadata, KVCache


class NativeAttention(AttentionBackend):
    """See `AttentionBackend`. Queries travel inside qkv; layout of a block: attention_step.h."""

    name = "native"
    is_exact = True

    def __init__(self, library: ctypes.CDLL, num_heads: int) -> None:
        launchers = launch_rotate_and_write, launch_rotate_latent
        super().__init__(num_heads, *(partial(launch, library) for launch in launchers))
        self._library = library

    def attend(
        self,
        query: Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        position_bias: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if not spec.is_causal:
            return launch_encoder_attention(
                self._library,
                query,
                self._num_heads,
                spec.num_kv_heads,
                metadata.query_starts,
                spec.window,
                spec.soft_cap,
                spec.scale,
                position_bias,
            )
        return launch_paged_attention(
            self._library,
            query,
            query.stride(0),
            self._num_heads,
            *kv_cache,
            metadata.block_tables,
            metadata.query_starts,
            metadata.seq_lens,
            spec.window,
            spec.soft_cap,
            spec.scale,
            sinks,
            value_size_of(spec),
        )
