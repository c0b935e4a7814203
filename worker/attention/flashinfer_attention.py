"""Attention by FlashInfer's paged kernels, for who asks for them; our kernel writes what they read.

By the documentation of flashinfer-python 0.7: a wrapper is planned on the host for a step, then run in each
layer. One that a graph was captured with is planned again, in the same buffers, before each replay.
Legend: T tokens, R requests, H query heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...ipc.spec.model_spec import AttentionSpec
from ...kernels.attention.rotate_and_write_triton import launch_rotate_and_write
from .backend import AttentionBackend, HostStep
from .metadata import AttentionMetadata, KVCache

_FLOAT_WORKSPACE_BYTES = 128 << 20  # as its documentation recommends; all wrappers take turns
_INT_WORKSPACE_BYTES = 2 << 20  # plans of 2048 tokens; a wrapper keeps as much pinned memory
_NO_WINDOW = -1

_Kind = tuple[int | None, float | None, float | None, int]  # window, soft cap, scale, KV group


@dataclass(frozen=True, slots=True)
class _GraphShape:
    """Tokens and requests of a graph."""

    num_tokens: int
    num_requests: int


class _Plan:
    """A wrapper and when the device has read what the host planned: its pinned memory is free from then."""

    def __init__(self, wrapper: Any, device: torch.device) -> None:
        self.wrapper = wrapper
        self._read = torch.cuda.Event() if device.type == "cuda" else None

    def make(self, *args: Any, **options: Any) -> None:
        if self._read is not None:
            self._read.synchronize()
        self.wrapper.plan(*args, **options)
        if self._read is not None:
            self._read.record()


class FlashInferAttention(AttentionBackend):
    """See `AttentionBackend`. For all layers with the same heads, whatever their windows."""

    name = "flashinfer"
    is_capturable = captures_chunks = True

    def __init__(self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec.num_heads, launch_rotate_and_write)
        self._heads = spec.num_heads, spec.num_kv_heads, spec.head_size
        self._dtype, self._device = dtype, device
        self._workspace = torch.zeros(_FLOAT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._int_workspaces: dict[tuple[_Kind, bool], Tensor] = {}  # the latter: of graphs
        self._planned_for: Tensor | None = None  # a step's seq_lens, the same in all KV groups
        self._planned: set[_Kind] = set()
        self._plans: dict[_Kind, _Plan] = {}  # of steps without graphs
        self._captured: dict[_GraphShape, dict[_Kind, _Plan]] = {}
        self._buffers: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}  # of all graphs, by KV group

    def attend(
        self,
        query: Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        position_bias: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        assert spec.is_causal
        assert sinks is None
        assert position_bias is None
        num_heads, _, head_size = self._heads
        kind = spec.window, spec.soft_cap, spec.scale, spec.kv_group
        block_size = kv_cache[0].shape[2]
        if metadata.kind_bounds is None:
            plan = self._find_plan(kind, metadata, block_size)
        else:
            plan = self._find_captured(kind, metadata, block_size, query.shape[0])
        # A view of the first columns of qkv: FlashInfer takes any stride between tokens.
        queries = query[:, : num_heads * head_size].unflatten(1, (num_heads, head_size))
        return plan.wrapper.run(queries, kv_cache).flatten(1)

    def prepare_replay(
        self, num_tokens: int, num_requests: int, steps: Sequence[HostStep], block_size: int
    ) -> None:
        """Plan the wrappers of the graph of this shape for a step, which may be smaller."""
        for kind, plan in self._captured[_GraphShape(num_tokens, num_requests)].items():
            self._make_plan(plan, kind, _pad(steps[kind[3]], num_requests), block_size)

    def _find_plan(self, kind: _Kind, metadata: AttentionMetadata, block_size: int) -> _Plan:
        """Made in a step's first layer of each kind."""
        if self._planned_for is not metadata.seq_lens:
            self._planned_for, self._planned = metadata.seq_lens, set()
        if kind not in self._plans:
            self._plans[kind] = _Plan(self._make_wrapper(kind), self._device)
        if kind not in self._planned:
            self._make_plan(self._plans[kind], kind, metadata.to_host_step(), block_size)
            self._planned.add(kind)
        return self._plans[kind]

    def _find_captured(
        self, kind: _Kind, metadata: AttentionMetadata, block_size: int, num_tokens: int
    ) -> _Plan:
        """Made before the capture, for as many tokens as there can be: one request has those in excess."""
        count = metadata.num_requests
        plans = self._captured.setdefault(_GraphShape(num_tokens, count), {})
        if kind not in plans:
            buffers = self._find_buffers(kind[3], metadata)
            lengths = np.ones(count, dtype=np.int32)
            lengths[0] += num_tokens - count
            starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
            tables = np.zeros((count, -(-int(lengths.max()) // block_size)), dtype=np.int32)
            wrapper = self._make_wrapper(
                kind,
                use_cuda_graph=True,
                qo_indptr_buf=buffers[0][: count + 1],
                paged_kv_indptr_buf=buffers[1][: count + 1],
                paged_kv_indices_buf=buffers[2],
                paged_kv_last_page_len_buf=buffers[3][:count],
            )
            plans[kind] = _Plan(wrapper, self._device)
            self._make_plan(plans[kind], kind, HostStep(starts, lengths, tables), block_size)
        return plans[kind]

    def _find_buffers(self, group: int, metadata: AttentionMetadata) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What graphs read, as large as the first, the largest one, needs: they replay one by one."""
        needs = metadata.num_requests + 1, metadata.block_tables.numel()
        before = self._buffers.get(group)
        if before is None or len(before[0]) < needs[0] or len(before[2]) < needs[1]:
            sizes = (needs[0], needs[0], needs[1], needs[0])
            one, two, three, four = (
                torch.zeros(size, dtype=torch.int32, device=self._device) for size in sizes
            )
            self._buffers[group] = one, two, three, four
        return self._buffers[group]

    def _make_wrapper(self, kind: _Kind, **options: Any) -> Any:
        import flashinfer  # pyright: ignore[reportMissingImports]

        library: Any = flashinfer
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND", **options)
        # Its own integers would take 8 MB for each graph. Graphs of one kind take turns, and so may they; a
        # step without graphs is planned while a graph may still be reading.
        key = kind, bool(options)
        if key not in self._int_workspaces:
            self._int_workspaces[key] = torch.empty(
                _INT_WORKSPACE_BYTES, dtype=torch.uint8, device=self._device
            )
        wrapper.reset_workspace_buffer(self._workspace, self._int_workspaces[key])
        return wrapper

    def _make_plan(self, plan: _Plan, kind: _Kind, step: HostStep, block_size: int) -> None:
        """Host arrays in, so that nothing waits for the device."""
        window, soft_cap, scale, _ = kind
        counts = -(-step.seq_lens // block_size)
        is_used = np.arange(step.block_tables.shape[1]) < counts[:, None]
        num_heads, num_kv_heads, head_size = self._heads
        plan.make(
            torch.from_numpy(step.query_starts),
            _from_numpy(np.concatenate(([0], np.cumsum(counts)))),
            _from_numpy(step.block_tables[is_used]),
            _from_numpy(step.seq_lens - np.maximum(counts - 1, 0) * block_size),
            num_heads,
            num_kv_heads,
            head_size,
            block_size,
            causal=True,
            sm_scale=scale or head_size**-0.5,
            window_left=_NO_WINDOW if window is None else window - 1,
            logits_soft_cap=soft_cap,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )


def _from_numpy(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(array.astype(np.int32))


def _pad(step: HostStep, num_requests: int) -> HostStep:
    """With requests of no tokens and no keys up to so many."""
    missing = num_requests - len(step.seq_lens)
    return HostStep(
        np.pad(step.query_starts, (0, missing), mode="edge"),
        np.pad(step.seq_lens, (0, missing)),
        np.pad(step.block_tables, ((0, missing), (0, 0))),
    )
