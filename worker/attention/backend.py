"""What an attention backend is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from torch import Tensor

from ...ipc.spec.model_spec import AttentionSpec
from ...kernels.attention.narrow_cache import find_head_size
from ...kernels.attention.paged_attention import NO_WINDOW
from ...kernels.attention.rotate_and_write import QKNorm, rotate_latent_reference
from .metadata import AttentionMetadata, HostStep, KVCache


class AttentionBackend(ABC):
    """Two calls a layer, in this order; between them all K and V of the step are in the layer's cache.

    Legend: T tokens, H query heads, G kv heads, D head size.
    """

    name = ""  # what operators call it
    # Whether a step of single tokens can be captured into a CUDA graph: it reads nothing on the host.
    is_capturable = False
    # Whether any other step can be, whose metadata has `kind_bounds`.
    captures_chunks = False
    # Whether a query's bits depend on its own sequence alone.
    is_exact = False

    def __init__(
        self,
        num_heads: int,
        rotate_and_write: Callable[..., Tensor | None],
        rotate_latent: Callable[..., None] = rotate_latent_reference,
    ) -> None:
        self._num_heads = num_heads
        self._rotate_and_write, self._rotate_latent = rotate_and_write, rotate_latent

    def write_latent(
        self,
        query: Tensor,
        latent: Tensor,
        rank: int,
        angles: tuple[Tensor, Tensor] | None,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Rotate the ends of queries [T, H, nope + rope] and of latents [T, rank + rope], write the latents.

        What comes back is for this backend's `attend`, contiguous and as long a head as the cache's keys: the
        queries' rotated ends, after `rank` numbers a head that are still to be computed.
        """
        rows = query.new_empty((*query.shape[:2], find_head_size(kv_cache[0])))
        self._rotate_latent(
            query, rows, latent, rank, *(angles or (None, None)), kv_cache[0], metadata.slot_mapping
        )
        return rows

    def rotate_and_write(
        self,
        qkv: Tensor,
        angles: tuple[Tensor, Tensor] | None,
        qk_norm: QKNorm | None,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Norm and rotate q and k of `qkv` [T, (H + 2 G) D], write k and v to their slots.

        The caches are [blocks, G, block_size, D], or as in narrow_cache.py.
        What comes back holds the queries in the form that this backend's `attend` takes; `qkv` may be
        overwritten by it. `angles` are cos and sin, float32 [T, D / 2], None where nothing is rotated.
        """
        query = self._rotate_and_write(
            qkv, self._num_heads, *(angles or (None, None)), qk_norm, *kv_cache, metadata.slot_mapping
        )
        return qkv if query is None else query

    def prepare_replay(
        self, num_tokens: int, num_requests: int, steps: Sequence[HostStep], block_size: int
    ) -> None:
        """Called before a graph of so many tokens and requests is replayed for a step, given by KV group."""
        del num_tokens, num_requests, steps, block_size

    @abstractmethod
    def attend(
        self,
        query: Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        position_bias: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """[T, H * D], of latents [T, H * rank]: attention of the queries over what the spec lets them see.

        `sinks` are float32 [H], given where the spec has them.
        """


def value_size_of(spec: AttentionSpec) -> int | None:
    """How many of a key's first numbers are its value; None where values lie by themselves."""
    return None if spec.latent is None else spec.latent.rank


def count_ahead(spec: AttentionSpec) -> int:
    """How many keys after itself a query sees."""
    if spec.is_causal:
        return 0
    return NO_WINDOW if spec.window is None else spec.window - 1
