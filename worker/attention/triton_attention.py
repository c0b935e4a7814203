"""Attention by the Triton kernels. Queries travel inside qkv; blocks lie as the torch reference has them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ...ipc.spec.model_spec import AttentionSpec
from ...kernels.attention.attention_plan_triton import AttentionPlan, SplitWork, launch_plan, plan_attention
from ...kernels.attention.paged_attention_triton import count_head_tiles, launch_paged_attention
from ...kernels.attention.rotate_and_write_triton import launch_rotate_and_write, launch_rotate_latent
from ...kernels.triton.direct_launch import LaunchTape, recorded_launches
from .backend import AttentionBackend, count_ahead, value_size_of
from .metadata import AttentionMetadata, KVCache


@dataclass(frozen=True, slots=True)
class Card:
    """What plans are made for."""

    num_processors: int  # streaming multiprocessors
    shared_bytes: int  # that a program may have


class TritonAttention(AttentionBackend):
    """See `AttentionBackend`. `is_strict` makes a row's bits depend on its sequence alone.

    A plan follows from the number of requests and the bound on their lengths, and the kernels read the rest
    on the device: a step can be captured into a graph. Elsewhere the metadata's host copies spare a transfer.
    """

    name = "triton"
    is_capturable = captures_chunks = True

    def __init__(self, num_heads: int, card: Card, is_strict: bool = False) -> None:
        super().__init__(num_heads, launch_rotate_and_write, launch_rotate_latent)
        self._card = card
        self.is_exact = is_strict
        self._planned_for: Tensor | None = None  # a step's seq_lens, the same in all KV groups
        self._plan: AttentionPlan | None = None
        self._work: dict[int | None, SplitWork | None] = {}  # by window
        # A step's other layers launch the same once more, into the same result: it has been read by then.
        self._again: dict[tuple[AttentionSpec, torch.Size], tuple[LaunchTape, Tensor]] = {}

    def attend(
        self,
        query: Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        position_bias: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        inputs = (query, *kv_cache) if sinks is None else (query, *kv_cache, sinks)
        key = spec, query.shape
        is_planned = metadata.seq_lens is self._planned_for
        again = self._again.get(key) if is_planned and position_bias is None else None
        if again is not None and again[0].run(inputs):
            return again[1]
        value_size = value_size_of(spec)
        num_tiles = count_head_tiles(self._num_heads, kv_cache[0].shape[1], value_size)
        plan, work = self._find_plan(metadata, num_tiles, spec.window)
        with recorded_launches(inputs) as tape:
            attended = launch_paged_attention(
                query,
                query.stride(0),
                self._num_heads,
                *kv_cache,
                metadata.block_tables,
                metadata.query_starts,
                metadata.seq_lens,
                spec.window,
                plan,
                work,
                spec.soft_cap,
                spec.scale,
                count_ahead(spec),
                position_bias,
                sinks,
                value_size,
            )
        if tape.is_whole:
            self._again[key] = tape, attended
        return attended

    def _find_plan(
        self, metadata: AttentionMetadata, num_tiles: int, window: int | None
    ) -> tuple[AttentionPlan, SplitWork | None]:
        """Made in the step's first layer, and the work in the first of each window; kept for the others."""
        if self._planned_for is not metadata.seq_lens or self._plan is None:
            self._planned_for, self._work = metadata.seq_lens, {}
            self._again = {}
            self._plan = plan_attention(
                *(metadata.kind_bounds or _count_kinds(metadata)),
                metadata.num_requests,
                num_tiles,
                metadata.max_seq_len,
                self._card.num_processors,
                self.is_exact,
                shared_bytes=self._card.shared_bytes,
            )
        if window not in self._work:
            self._work[window] = launch_plan(self._plan, metadata.query_starts, metadata.seq_lens, window)
        return self._plan, self._work[window]


def _count_kinds(metadata: AttentionMetadata) -> tuple[int, int]:
    """Requests with one token in this step, and with more."""
    if metadata.max_query_len == 1:
        return metadata.num_requests, 0
    starts = metadata.query_starts_list()
    num_singles = sum(end - start == 1 for start, end in pairwise(starts))
    return num_singles, metadata.num_requests - num_singles


def find_card(device: torch.device) -> Card:
    """What a GPU has; where the interpreter stands in for one, one processor as large as the largest."""
    if device.type != "cuda":
        return Card(num_processors=1, shared_bytes=227 << 10)
    properties = torch.cuda.get_device_properties(device)
    return Card(properties.multi_processor_count, properties.shared_memory_per_block_optin)
