"""transformers' attention interface on the paged cache: one call a layer, in the order of the plan.

Legend: T tokens of a step, H query heads, G kv heads, D head size of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ....ipc.spec.model_spec import AttentionSpec
from ...attention import AttentionBackend
from ...attention.metadata import AttentionMetadata, KVCaches

if TYPE_CHECKING:
    from collections.abc import Generator

NAME = "quire"  # in transformers' registers


@dataclass(slots=True)
class _Step:
    """The pass that is being computed, and how many of its attention calls have come."""

    layers: Sequence[tuple[AttentionSpec, AttentionBackend]]
    kv_caches: KVCaches
    metadata: AttentionMetadata
    num_calls: int = 0


_step: _Step | None = None


@contextmanager
def attending(
    layers: Sequence[tuple[AttentionSpec, AttentionBackend]], kv_caches: KVCaches, metadata: AttentionMetadata
) -> Generator[None]:
    """Within it a model's attention reads and writes these caches; one pass at a time."""
    global _step
    _step = step = _Step(layers, kv_caches, metadata)
    try:
        yield
    finally:
        _step = None
    assert step.num_calls == len(layers), f"{step.num_calls} attention calls, {len(layers)} planned"


def register() -> None:
    """Put `attend` into transformers' register. It has no mask there: the metadata says what is seen."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)


def attend(
    module: nn.Module,  # noqa: ARG001
    query: Tensor,  # [1, H, T, D or less]
    key: Tensor,  # [1, G, T, D or less]
    value: Tensor,  # [1, G, T, D or less]
    attention_mask: Tensor | None,  # noqa: ARG001
    s_aux: Tensor | None = None,  # [H], sinks
    **_: Any,
) -> tuple[Tensor, None]:
    """[1, T, H, size of a value]. The keywords are those of the plan, which has looked at them."""
    step = _step
    assert step is not None
    spec, backend = step.layers[step.num_calls]
    kv_cache, metadata = step.kv_caches[step.num_calls], step.metadata.for_group(spec.kv_group)
    step.num_calls += 1
    value_size = value.shape[-1]
    parts = [_flatten(part, spec.head_size) for part in (query, key, value)]
    qkv = torch.cat(parts, dim=1)  # [T, (H + 2 G) D]
    queries = backend.rotate_and_write(qkv, None, None, kv_cache, metadata)
    sinks = None if s_aux is None else s_aux.detach().float().contiguous()
    attended = backend.attend(queries, kv_cache, metadata, spec, None, sinks)
    heads = attended.view(1, -1, spec.num_heads, spec.head_size)
    return (heads if value_size == spec.head_size else heads[..., :value_size].contiguous()), None


def _flatten(part: Tensor, head_size: int) -> Tensor:
    """[T, heads * D] of [1, heads, T, size]; heads that are narrower than the cache's end in zeros."""
    missing = head_size - part.shape[-1]
    part = F.pad(part, (0, missing)) if missing else part
    return part[0].transpose(0, 1).flatten(1)
