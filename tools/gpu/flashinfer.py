"""Is FlashInfer's attention right and fast on this GPU? Beside float32 and our kernels, and in an engine.

Where `device` is "cpu" a stand-in is called as FlashInfer would be, and a captured step runs without a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor

from ...ipc.spec.config import AttentionBackendName
from ...ipc.spec.model_spec import AttentionSpec
from ...kernels.attention.flashinfer_attention import find_fault
from ...kernels.attention.paged_attention import paged_attention_reference
from ...worker.attention import AttentionBackend, make_attention
from ...worker.attention.metadata import AttentionMetadata, KVCache
from ..bench.ceilings import time_best
from .engine import bench_attention_backend
from .rows import Row, Say

_CALLS_A_GRAPH = 10
_SLACK = 1.5  # how much farther than our kernels from float32 it may be in the mean
_BLOCK_SIZE = 16
_SPEC = AttentionSpec(num_heads=32, num_kv_heads=8, head_size=128)


@dataclass(frozen=True, slots=True)
class _Case:
    name: str
    requests: tuple[tuple[int, int], ...]  # (tokens of this step, tokens of all)
    spec: AttentionSpec = _SPEC


_MIXED = ((1, 900), (1, 17), (300, 300), (64, 1000), (1, 4096))
_RIGHT = (
    _Case("decode", ((1, 4096), (1, 1), (1, 777))),
    _Case("mixed", _MIXED),
    _Case("mixed, window 128", _MIXED, msgspec.structs.replace(_SPEC, window=128)),
    _Case("mixed, soft cap 30", _MIXED, msgspec.structs.replace(_SPEC, soft_cap=30.0)),
)
_FAST = (
    _Case("decode 64 x 4096", ((1, 4096),) * 64),
    _Case("decode 1 x 8192", ((1, 8192),)),
    _Case("prefill 1 x 8192", ((8192, 8192),)),
)


def check_flashinfer(say: Say, device: str = "cuda", scale: int = 1, model: str = "qwen3-0.6b") -> None:
    """Distances from float32, replays, times, decode; `scale` divides the lengths, for a look on a CPU."""
    fault = find_fault()
    if fault is not None:
        say(Row("FLASHINFER", f"not run: {fault}", "done", False))
        return
    for case in _RIGHT:
        say(_compare(_Step(case, device, scale), is_replayed=False))
    for case in _RIGHT[:2]:
        say(_compare(_Step(case, device, scale), is_replayed=True))
    for case in _FAST:
        step = _Step(case, device, scale)
        its, ours = (_time_call(step.attend_by(step.make(name)), device) for name in ("flashinfer", "triton"))
        say(Row(f"FLASHINFER {case.name}", f"{its * 1e6:,.0f} us, ours {ours * 1e6:,.0f} us"))
    bench_attention_backend(say, "FLASHINFER", device, model)


class _Step:
    """A case's tensors: queries as a layer has them, in the first columns of qkv."""

    def __init__(self, case: _Case, device: str, scale: int) -> None:
        self.name, self.spec, self.device = case.name, case.spec, torch.device(device)
        spec, make = case.spec, partial(torch.randn, dtype=torch.bfloat16, device=device)
        lengths = [-(-tokens // scale) for tokens, _ in case.requests]
        self.seq_lens = [-(-total // scale) for _, total in case.requests]
        self.starts = [sum(lengths[:number]) for number in range(len(lengths) + 1)]
        width = -(-max(self.seq_lens) // _BLOCK_SIZE)
        size = (len(lengths) * width, spec.num_kv_heads, _BLOCK_SIZE, spec.head_size)
        self.caches: KVCache = (make(size), make(size))
        tables = torch.randperm(size[0], device=device).int().view(len(lengths), width)
        row_size = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_size
        self.query = make((self.starts[-1], row_size))
        self.metadata = AttentionMetadata(
            torch.tensor(self.starts, dtype=torch.int32, device=device),
            torch.tensor(self.seq_lens, dtype=torch.int32, device=device),
            tables,
            torch.zeros(self.starts[-1], dtype=torch.int64, device=device),
            max(lengths),
            max(self.seq_lens),
        )

    def make(self, name: AttentionBackendName) -> AttentionBackend:
        backend = make_attention(self.spec, torch.bfloat16, self.device, wanted=name)
        assert backend.name == name, f"{name} does not cover {self.spec}"
        return backend

    def attend_by(self, backend: AttentionBackend) -> Callable[[], Tensor]:
        return lambda: backend.attend(self.query, self.caches, self.metadata, self.spec)

    def replay_by(self, backend: AttentionBackend) -> Tensor:
        """Captured with room for one request and some tokens more, and planned for this step."""
        count, num_requests = self.starts[-1] + 7, len(self.seq_lens) + 1
        whole = torch.zeros((count, self.query.shape[1]), dtype=self.query.dtype, device=self.device)
        zeros = torch.zeros(num_requests + 1, dtype=torch.int32, device=self.device)
        tables = torch.zeros((num_requests, self.metadata.block_tables.shape[1]), dtype=torch.int32)
        bounds = replace(
            self.metadata,
            query_starts=zeros,
            seq_lens=zeros[1:],
            block_tables=tables.to(self.device),
            max_query_len=count,
            kind_bounds=(num_requests, num_requests),
        )

        def attend() -> Tensor:
            return backend.attend(whole, self.caches, bounds, self.spec)

        attend()
        graph: Any = None
        attended = whole
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                attended = attend()
        whole[: self.starts[-1]] = self.query
        backend.prepare_replay(count, num_requests, [self.metadata.to_host_step()], _BLOCK_SIZE)
        if graph is None:
            attended = attend()
        else:
            graph.replay()
        return attended[: self.starts[-1]]

    def compute_exactly(self) -> Tensor:
        """[T, H D] in float32."""
        spec, tables = self.spec, self.metadata.block_tables
        query = self.query[:, : spec.num_heads * spec.head_size].unflatten(1, (spec.num_heads, -1))
        k_cache, v_cache = (cache.float() for cache in self.caches)
        return paged_attention_reference(
            query.float(), k_cache, v_cache, tables, self.starts, self.seq_lens, spec.window, spec.soft_cap
        ).flatten(1)


def _compare(step: _Step, is_replayed: bool) -> Row:
    exact, its, ours = step.compute_exactly(), step.make("flashinfer"), step.make("triton")
    attended = step.replay_by(its) if is_replayed else step.attend_by(its)()
    its_error, our_error = (
        float((result.float() - exact).abs().mean()) for result in (attended, step.attend_by(ours)())
    )
    return Row(
        f"FLASHINFER {step.name}" + (", replayed" if is_replayed else ""),
        f"off by {its_error:.1e} in the mean, ours by {our_error:.1e}",
        f"at most {_SLACK} times",
        its_error <= _SLACK * our_error,  # not of NaN
    )


def _time_call(call: Callable[[], object], device: str) -> float:
    """Least seconds of a call, of several in a graph: launches from Python are not what is measured."""
    if device == "cpu":
        return time_best(call, device, rounds=1)
    call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS_A_GRAPH):
            call()
    return time_best(graph.replay, device) / _CALLS_A_GRAPH
