"""What an attention backend is, and which one a device gets."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ...ipc.model_spec import AttentionSpec
from .metadata import AttentionMetadata

# Weights [D] of the norms of query and key heads, and their epsilon.
QKNorm = tuple[Tensor, Tensor, float]


class AttentionBackend(Protocol):
    """Two calls a layer, in this order; between them all K and V of the step are in the layer's cache.

    Legend: T tokens, H query heads, G kv heads, D head size.
    """

    @property
    def is_capturable(self) -> bool:
        """True if a step of single tokens can be captured into a CUDA graph: it reads nothing on the host."""
        ...

    @property
    def is_exact(self) -> bool:
        """True if a query's bits depend on its own sequence alone."""
        ...

    def rotate_and_write(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        qk_norm: QKNorm | None,
        kv_cache: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Norm and rotate q and k of `qkv` [T, (H + 2 G) D], write k and v to their slots.

        What comes back holds the queries in the form that this backend's `attend` takes; `qkv` may be
        overwritten by it. `cos` and `sin` are float32 [T, D / 2].
        """
        ...

    def attend(
        self,
        query: Tensor,
        kv_cache: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
        spec: AttentionSpec,
    ) -> Tensor:
        """[T, H * D]: attention of the queries over what the spec lets them see in the cache."""
        ...
