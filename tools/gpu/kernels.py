"""Is attention fast on this GPU? Each case as a fraction of what the device allows: copies, matrix products.

Cases run inside a CUDA graph, so that launches from Python are not what is measured. Where no GPU is,
`device` "cpu" runs them in Triton's interpreter, which says nothing about speed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.attention.attention_plan_triton import launch_plan, plan_attention
from ...kernels.attention.paged_attention_triton import TileShape, launch_paged_attention
from ...kernels.attention.rotate_and_write_triton import launch_rotate_and_write
from ...worker.attention.triton_attention import find_card
from ..bench.ceilings import measure_copy_rate, measure_matrix_rate, time_best
from .rows import Row, Say, judge

_HEAD_SIZE = 128
_BLOCK_SIZE = 16
_CALLS_A_GRAPH = 10
_COPY_BYTES = 1 << 30
_LEAST_OF_COPY = 0.85
_LEAST_OF_MATRIX_RATE = 0.50


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """Requests that are alike."""

    name: str
    num_requests: int
    seq_len: int
    query_len: int
    num_heads: int
    num_kv_heads: int
    is_strict: bool = False
    looks_ahead: bool = False
    least: float | None = None  # of the copy rate for decodes, of the matrix rate for chunks


_CASES = (
    AttentionCase("decode 64 x 4096, 32/8 heads", 64, 4096, 1, 32, 8, least=_LEAST_OF_COPY),
    AttentionCase("decode 64 x 4096, 16/8 heads", 64, 4096, 1, 16, 8, least=_LEAST_OF_COPY),
    AttentionCase("decode 64 x 4096, 32/8 heads, strict", 64, 4096, 1, 32, 8, is_strict=True),
    AttentionCase("decode 256 x 1024, 16/8 heads", 256, 1024, 1, 16, 8),
    AttentionCase("decode 1 x 8192, 32/8 heads", 1, 8192, 1, 32, 8),
    AttentionCase("decode 1 x 8192, 32/8 heads, strict", 1, 8192, 1, 32, 8, is_strict=True),
    AttentionCase("prefill 1 x 8192, 32/8 heads", 1, 8192, 8192, 32, 8, least=_LEAST_OF_MATRIX_RATE),
    AttentionCase("prefill 1 x 8192, 32/8 heads, strict", 1, 8192, 8192, 32, 8, is_strict=True),
    AttentionCase("prefill 8 x 1024, 16/8 heads", 8, 1024, 1024, 16, 8),
    AttentionCase("both ways 64 x 256, 16/16 heads", 64, 256, 256, 16, 16, looks_ahead=True),
)


def bench_kernels(say: Say, device: str = "cuda", scale: int = 1) -> None:
    """The ceilings, then every case. `scale` divides the lengths, for a look without a GPU."""
    copy_rate = measure_copy_rate(device, _COPY_BYTES // scale)
    matrix_rate = measure_matrix_rate(device, "bfloat16")
    say(Row("copy, read + written", f"{copy_rate / 1e9:,.0f} GB/s"))
    say(Row("bfloat16 matrix product", f"{matrix_rate / 1e12:,.0f} TFLOP/s"))
    for case in _CASES:
        say(bench_attention(case, device, scale, (copy_rate, matrix_rate)))
    for num_tokens in (1, 256, 8192):
        say(_bench_rotation(max(1, num_tokens // scale), device, copy_rate))


def bench_attention(
    case: AttentionCase,
    device: str,
    scale: int,
    rates: tuple[float, float],
    block_size: int = _BLOCK_SIZE,
    tile: TileShape | None = None,
) -> Row:
    """Of one layer; rates are those of copies and of matrix products. `tile` None: as it is served."""
    copy_rate, matrix_rate = rates
    seq_len, query_len = case.seq_len // scale, max(1, case.query_len // scale)
    num_requests = max(1, case.num_requests // scale)
    blocks_each = -(-seq_len // block_size)
    num_blocks = num_requests * blocks_each
    size = (num_blocks, case.num_kv_heads, block_size, _HEAD_SIZE)
    k_cache, v_cache = (torch.randn(size, dtype=torch.bfloat16, device=device) for _ in range(2))
    tables = torch.randperm(num_blocks, device=device).int().view(num_requests, blocks_each)
    starts = torch.arange(num_requests + 1, dtype=torch.int32, device=device) * query_len
    lengths = torch.full((num_requests,), seq_len, dtype=torch.int32, device=device)
    row_size = case.num_heads * _HEAD_SIZE
    query = torch.randn(num_requests * query_len, row_size, dtype=torch.bfloat16, device=device)
    singles = num_requests if query_len == 1 else 0
    card = find_card(torch.device(device))
    plan = plan_attention(
        singles,
        num_requests - singles,
        num_requests,
        case.num_kv_heads,
        seq_len,
        card.num_processors,
        case.is_strict,
        shared_bytes=card.shared_bytes,
    )
    work = launch_plan(plan, starts, lengths, None)  # once a step, not once a layer

    def attend() -> Tensor:
        tensors = (k_cache, v_cache, tables, starts, lengths)
        ahead = seq_len if case.looks_ahead else 0
        return launch_paged_attention(
            query, row_size, case.num_heads, *tensors, None, plan, work, ahead=ahead, tile=tile
        )

    seconds = time_call(attend, device)
    if query_len == 1:
        rate = (k_cache.nbytes + v_cache.nbytes) / seconds
        fraction, detail = rate / copy_rate, f"{rate / 1e9:,.0f} GB/s, {seconds * 1e6:,.0f} us"
    else:
        seen = range(seq_len - query_len + 1, seq_len + 1)
        pairs = num_requests * (query_len * seq_len if case.looks_ahead else sum(seen))
        rate = 4 * _HEAD_SIZE * case.num_heads * pairs / seconds
        fraction, detail = rate / matrix_rate, f"{rate / 1e12:,.0f} TFLOP/s, {seconds * 1e6:,.0f} us"
    if case.least is None:
        return Row(case.name, f"{fraction:.0%} ({detail})")
    return judge(case.name, fraction, case.least, detail)


def _bench_rotation(num_tokens: int, device: str, copy_rate: float) -> Row:
    num_heads, num_kv_heads = 32, 8
    num_blocks = -(-num_tokens // _BLOCK_SIZE)
    width = (num_heads + 2 * num_kv_heads) * _HEAD_SIZE
    qkv = torch.randn(num_tokens, width, dtype=torch.bfloat16, device=device)
    angles = torch.rand(2, num_tokens, _HEAD_SIZE // 2, device=device)
    size = (num_blocks, num_kv_heads, _BLOCK_SIZE, _HEAD_SIZE)
    k_cache, v_cache = (torch.empty(size, dtype=torch.bfloat16, device=device) for _ in range(2))
    weight = torch.ones(_HEAD_SIZE, dtype=torch.bfloat16, device=device)
    slots = torch.arange(num_tokens, device=device)

    def rotate() -> None:
        launch_rotate_and_write(
            qkv, num_heads, angles[0], angles[1], (weight, weight, 1e-6), k_cache, v_cache, slots
        )

    seconds = time_call(rotate, device)
    rate = (2 * qkv.nbytes + angles.nbytes) / seconds
    detail = f"{rate / copy_rate:.0%} ({rate / 1e9:,.0f} GB/s, {seconds * 1e6:,.1f} us)"
    return Row(f"rotate and write {num_tokens} tokens", detail)


def time_call(call: Callable[[], object], device: str) -> float:
    """Least seconds of a call, of several in a graph."""
    if device == "cpu":
        return time_best(call, device, rounds=1)
    call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS_A_GRAPH):
            call()
    return time_best(graph.replay, device) / _CALLS_A_GRAPH
