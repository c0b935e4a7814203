"""The attention layer: projections around a backend that knows the paged cache."""

from __future__ import annotations

from torch import Tensor

from ..attention import AttentionBackend, QKNorm
from ..attention.metadata import AttentionMetadata
from .linear import Linear


class Attention:
    """Self-attention of one decoder layer."""

    def __init__(
        self,
        qkv_proj: Linear,
        o_proj: Linear,
        qk_norm: QKNorm | None,
        window: int | None,
        backend: AttentionBackend,
    ) -> None:
        self.qkv_proj = qkv_proj
        self.o_proj = o_proj
        self.qk_norm = qk_norm
        self.window = window
        self.backend = backend

    def __call__(
        self,
        hidden: Tensor,
        angles: tuple[Tensor, Tensor],
        kv_cache: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
    ) -> Tensor:
        """[T, hidden] from [T, hidden]; the step's K and V are in the cache afterwards."""
        qkv = self.qkv_proj(hidden)
        query = self.backend.rotate_and_write(qkv, *angles, self.qk_norm, kv_cache, metadata)
        return self.o_proj(self.backend.attend(query, kv_cache, metadata, self.window))
