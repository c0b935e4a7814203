"""The linear layers of `quire bench kernels`. Legend: m rows, K in, N out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from ...ipc.spec.weight_format import Quantization, make_online_formats
from ...worker.layers.linear import make_linear
from ...worker.weights.online import quantize
from .kernel_case import LLAMA_8B, QWEN3_600M, TINY, Bench, BenchShape, Case

_ROWS = (1, 8, 32, 256, 1024)
_FEW_ROWS = (1, 2, 4)  # of narrow weights, which are read faster than they are multiplied
_NARROW: dict[torch.dtype, Quantization] = {
    torch.uint4: "int4",  # pyright: ignore[reportAttributeAccessIssue]
    torch.int8: "int8",
}


@dataclass(frozen=True, slots=True)
class _Kind:
    """A layer; `dtype` is its weight's. `is_exact`: rows do not depend on the batch, also on a GPU."""

    name: str
    num_in: int
    num_out: int
    dtype: torch.dtype = torch.bfloat16
    is_resident: bool = False
    is_exact: bool = False


def make_linear_cases(bench: Bench) -> Iterator[Case]:
    """bfloat16, int4 and int8 weights and float32, from a single row to a prompt's."""
    for name, num_in, num_out in _list_linears(QWEN3_600M):
        yield from _make_linear(bench, _Kind(name, num_in, num_out), _ROWS)
    for dtype in (*_NARROW, torch.float32):
        rows = (*_FEW_ROWS, *_ROWS[1:]) if dtype in _NARROW else _ROWS
        for name, num_in, num_out in _list_linears(QWEN3_600M)[2:3]:
            yield from _make_linear(bench, _Kind(name, num_in, num_out, dtype), rows)
    for name, num_in, num_out in _list_linears(TINY)[:3]:
        yield from _make_linear(bench, _Kind(f"tiny {name}", num_in, num_out, is_resident=True), (1, 32, 256))
    if bench.device.type == "cuda":
        yield from _make_gpu_cases(bench)


def _make_gpu_cases(bench: Bench) -> Iterator[Case]:
    """A model that fills a GPU, and the form whose rows do not depend on the batch."""
    for name, num_in, num_out in _list_linears(LLAMA_8B):
        yield from _make_linear(bench, _Kind(f"8B {name}", num_in, num_out), (1, 256))
    for name, num_in, num_out in _list_linears(QWEN3_600M)[2:3]:
        yield from _make_linear(bench, _Kind(f"exact {name}", num_in, num_out, is_exact=True), _ROWS)


def _list_linears(shape: BenchShape) -> list[tuple[str, int, int]]:
    """(name, K, N) of a model's projections, fused as the worker fuses them."""
    spec = shape.attention
    return [
        ("qkv", shape.hidden_size, spec.qkv_size),
        ("o", spec.query_size, shape.hidden_size),
        ("gate_up", shape.hidden_size, 2 * shape.intermediate_size),
        ("down", shape.intermediate_size, shape.hidden_size),
        ("head", shape.hidden_size, shape.vocab_size),
    ]


def _make_linear(bench: Bench, kind: _Kind, rows: Sequence[int]) -> Iterator[Case]:
    """Torch's column for narrow weights is bfloat16, which it stands in for."""
    narrow = _NARROW.get(kind.dtype)
    x_dtype = kind.dtype if narrow is None else torch.bfloat16
    weight = bench.noise(kind.num_out, kind.num_in, dtype=x_dtype)
    format = None if narrow is None else make_online_formats(narrow, narrow).default
    stored = weight if format is None else quantize(weight, format)
    num_bytes = weight.nbytes if format is None else format.count_bytes(kind.num_out, kind.num_in)
    count = 1 if kind.is_resident else bench.count_copies(num_bytes)
    plain = [weight.clone() for _ in range(1 if kind.is_resident else bench.count_copies(weight.nbytes))]
    layers = [make_linear(stored, None, x_dtype, kind.is_exact) for _ in range(count)]
    for m in rows:
        x = bench.noise(m, kind.num_in, dtype=x_dtype)
        yield Case(
            op="linear",
            shape=f"{kind.name} {kind.num_in} x {kind.num_out}, m {m}",
            dtype=kind.dtype,
            calls=[lambda layer=layer, x=x: layer(x) for layer in layers],
            torch_calls=[lambda other=other, x=x: F.linear(x, other) for other in plain],
            num_bytes=num_bytes + x.nbytes + m * kind.num_out * x.element_size(),
            num_flops=2 * m * kind.num_in * kind.num_out,
            is_resident=kind.is_resident,
        )
