"""The rows of `quire bench kernels`: the operations in the shapes of two models, as the worker runs them.

The forms are those that the worker's own choosers pick for the device (C++ on a CPU, Triton on CUDA, torch
elsewhere), beside torch. Weights and caches rotate through more memory than a cache holds, as they do in a
model; activations stay where the operation before has left them. Legend: T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ...kernels.attention.paged_attention import paged_attention_reference
from ...kernels.attention.rotate_and_write import rotate_and_write_reference
from ...kernels.linear.gated_activation import gated_activation_reference
from ...kernels.norm.rms_norm import add_rms_norm_reference
from ...kernels.program.gather_rows import gather_rows_reference
from ...worker.attention import QKNorm, make_attention
from ...worker.layers.embedding import Embedding
from ...worker.layers.feed_forward import GatedActivation
from ...worker.layers.norm import RMSNorm
from ...worker.sampling.sampler import SamplingBatch, sample
from .encoder_cases import make_encoder_cases
from .kernel_case import LLAMA_8B, QWEN3_600M, TINY, Bench, BenchShape, Case, copy_cache
from .linear_cases import make_linear_cases

_NORM_EPS = 1e-6
_MAX_INDEXES = 2048  # of the embedding's rows, which are spread over a table of 311 MB


def make_attention_cases(bench: Bench) -> Iterator[Case]:
    """Decoding batches, and prompts of one request."""
    is_gpu = bench.device.type == "cuda"
    for batch, length in ((1, 2048), (32, 512), (64, 4096 if is_gpu else 2048)):
        yield _make_decode(bench, QWEN3_600M, "", batch, length, torch.bfloat16)
    if is_gpu:  # too large for a CPU's memory
        yield _make_decode(bench, LLAMA_8B, "8b ", 64, 4096, torch.bfloat16)
        yield _make_prefill(bench, LLAMA_8B, "8b ", 8192, torch.bfloat16)
    yield _make_decode(bench, QWEN3_600M, "", 32, 512, torch.float32)
    yield _make_decode(bench, TINY, "tiny ", 1, 256, torch.bfloat16)
    yield _make_decode(bench, TINY, "tiny ", 256, 64, torch.bfloat16)
    for length in (512, 8192 if is_gpu else 2048):
        yield _make_prefill(bench, QWEN3_600M, "", length, torch.bfloat16)
    yield _make_prefill(bench, QWEN3_600M, "", 512, torch.float32)


def _make_decode(
    bench: Bench, shape: BenchShape, name: str, batch: int, length: int, dtype: torch.dtype
) -> Case:
    spec = shape.attention
    metadata = bench.make_step([1] * batch, [length] * batch)
    backend = make_attention(spec, dtype, bench.device)
    qkv = bench.noise(batch, spec.qkv_size, dtype=dtype)
    query = qkv[:, : spec.query_size].reshape(batch, spec.num_heads, spec.head_size)
    num_bytes = 2 * batch * length * spec.kv_size * qkv.element_size()
    is_resident = shape is TINY
    count = 1 if is_resident else bench.count_copies(num_bytes)
    first = bench.make_cache(shape.attention, metadata, dtype)
    caches = [first, *(copy_cache(first) for _ in range(count - 1))]
    starts, lengths = metadata.query_starts_list(), metadata.seq_lens_list()
    return Case(
        op="paged attention",
        shape=f"{name}decode {batch} x {length}",
        dtype=dtype,
        calls=[lambda cache=cache: backend.attend(qkv, cache, metadata, spec) for cache in caches],
        torch_calls=[
            lambda cache=cache: paged_attention_reference(
                query, *cache, metadata.block_tables, starts, lengths, None
            )
            for cache in caches
        ],
        num_bytes=num_bytes,
        num_flops=4 * batch * length * spec.query_size,
        is_resident=is_resident,
    )


def _make_prefill(bench: Bench, shape: BenchShape, name: str, length: int, dtype: torch.dtype) -> Case:
    """Torch's column is its dense causal attention: it has no paged form."""
    spec = shape.attention
    metadata = bench.make_step([length], [length])
    backend = make_attention(spec, dtype, bench.device)
    qkv = bench.noise(length, spec.qkv_size, dtype=dtype)
    cache = bench.make_cache(shape.attention, metadata, dtype)
    heads = qkv.view(1, length, -1, spec.head_size).transpose(1, 2)
    query, key, value = heads.split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), dim=1)
    return Case(
        op="paged attention",
        shape=f"{name}prefill {length}",
        dtype=dtype,
        calls=[lambda: backend.attend(qkv, cache, metadata, spec)],
        torch_calls=[
            lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        ],
        num_bytes=2 * qkv.nbytes,
        num_flops=2 * length * (length + 1) * spec.query_size,
    )


def make_rotate_cases(bench: Bench) -> Iterator[Case]:
    """Norm of q and k by head, rotation, and the write to the cache."""
    for num_tokens in (1, 32, 512):
        yield _make_rotate(bench, QWEN3_600M, "", num_tokens)
    yield _make_rotate(bench, TINY, "tiny ", 1)


def _make_rotate(bench: Bench, shape: BenchShape, name: str, num_tokens: int) -> Case:
    spec = shape.attention
    dtype = torch.bfloat16
    metadata = bench.make_step([num_tokens], [num_tokens])
    backend = make_attention(spec, dtype, bench.device)
    qkv = bench.noise(num_tokens, spec.qkv_size, dtype=dtype)
    cache = bench.make_cache(shape.attention, metadata, dtype)
    angles = torch.rand(num_tokens, spec.head_size // 2, device=bench.device)
    cos, sin = angles.cos(), angles.sin()
    weight = torch.ones(spec.head_size, dtype=dtype, device=bench.device)
    norm: QKNorm | None = (weight, weight, _NORM_EPS) if spec.qk_norm else None
    kv_share = 2 * spec.kv_size / spec.qkv_size
    return Case(
        op="rotate and write",
        shape=f"{name}T {num_tokens}",
        dtype=dtype,
        calls=[lambda: backend.rotate_and_write(qkv, (cos, sin), norm, cache, metadata)],
        torch_calls=[
            lambda: rotate_and_write_reference(
                qkv, spec.num_heads, cos, sin, norm, *cache, metadata.slot_mapping
            )
        ],
        # q and k are written in place, k and v to the cache.
        num_bytes=int(qkv.nbytes * (2 + kv_share / 2)) + cos.nbytes + sin.nbytes,
        is_resident=True,
    )


def make_dense_cases(bench: Bench) -> Iterator[Case]:
    """The norm with its residual, the gated activation, and the embedding."""
    for name, shape in (("", QWEN3_600M), ("tiny ", TINY)):
        for num_tokens in (1, 256):
            yield _make_norm(bench, name, shape.hidden_size, num_tokens)
    for name, shape in (("", QWEN3_600M), ("tiny ", TINY)):
        for num_tokens in (1, 256):
            yield _make_activation(bench, name, shape.intermediate_size, num_tokens)
    for num_tokens in (1, 256):
        yield _make_embedding(bench, QWEN3_600M, num_tokens)


def _make_norm(bench: Bench, name: str, size: int, num_tokens: int) -> Case:
    dtype = torch.bfloat16
    x, residual = (bench.noise(num_tokens, size, dtype=dtype) for _ in range(2))
    zeros = torch.zeros_like(x)  # added in place again and again
    layer = RMSNorm(torch.ones(size, dtype=dtype, device=bench.device), _NORM_EPS)
    return Case(
        op="rms norm + residual",
        shape=f"{name}T {num_tokens} x {size}",
        dtype=dtype,
        calls=[lambda: layer.add(zeros, residual)],
        torch_calls=[lambda: add_rms_norm_reference(zeros, residual, layer.weight, _NORM_EPS)],
        num_bytes=4 * x.nbytes,
        is_resident=True,
    )


def _make_activation(bench: Bench, name: str, size: int, num_tokens: int) -> Case:
    gate_up = bench.noise(num_tokens, 2 * size, dtype=torch.bfloat16)
    layer = GatedActivation("silu", torch.bfloat16, bench.device)
    return Case(
        op="silu and multiply",
        shape=f"{name}T {num_tokens} x {size}",
        dtype=torch.bfloat16,
        calls=[lambda: layer(gate_up)],
        torch_calls=[lambda: gated_activation_reference(gate_up, "silu")],
        num_bytes=gate_up.nbytes * 3 // 2,
        is_resident=True,
    )


def _make_embedding(bench: Bench, shape: BenchShape, num_tokens: int) -> Case:
    table = bench.noise(shape.vocab_size, shape.hidden_size, dtype=torch.bfloat16)
    layer = Embedding(table)
    num_bytes = num_tokens * shape.hidden_size * table.element_size()  # read; the output stays in a cache
    count = min(_MAX_INDEXES, bench.count_copies(num_bytes))
    indexes = [torch.randint(shape.vocab_size, (num_tokens,), device=bench.device) for _ in range(count)]
    return Case(
        op="embedding",
        shape=f"T {num_tokens} of {shape.vocab_size} x {shape.hidden_size}",
        dtype=torch.bfloat16,
        calls=[lambda index=index: layer(index, index) for index in indexes],
        torch_calls=[lambda index=index: gather_rows_reference(table, index) for index in indexes],
        num_bytes=num_bytes,
    )


def make_sampling_cases(bench: Bench) -> Iterator[Case]:
    """Greedy, by temperature, and with filters. Torch's column is its usual form of the same."""
    for name, num_rows, vocab_size in (
        ("", 1, QWEN3_600M.vocab_size),
        ("", 32, QWEN3_600M.vocab_size),
        ("tiny ", 256, TINY.vocab_size),
    ):
        logits = bench.noise(num_rows, vocab_size, dtype=torch.float32) * 3
        for kind, temperature, top_k, top_p, other in (
            ("greedy", 0.0, vocab_size, 1.0, _torch_greedy),
            ("temperature", 1.0, vocab_size, 1.0, _torch_random),
            ("top-k 50, top-p 0.9", 1.0, 50, 0.9, _torch_filtered),
        ):
            batch = _make_sampling_batch(num_rows, temperature, top_k, top_p)
            yield Case(
                op="sampling",
                shape=f"{name}{kind}, {num_rows} x {vocab_size}",
                dtype=torch.float32,
                calls=[lambda logits=logits, batch=batch: sample(logits, batch)],
                torch_calls=[lambda logits=logits, other=other: other(logits)],
                num_bytes=logits.nbytes,
                is_resident=True,  # the head has just written them
            )


def _torch_greedy(logits: Tensor) -> Tensor:
    return logits.argmax(-1)


def _torch_random(logits: Tensor) -> Tensor:
    return torch.multinomial(logits.softmax(-1), 1)


def _torch_filtered(logits: Tensor) -> Tensor:
    values, index = logits.topk(50, -1)
    weights = values.softmax(-1)
    weights = weights.masked_fill(weights.cumsum(-1) - weights > 0.9, 0.0)
    return index.gather(1, torch.multinomial(weights, 1))


def _make_sampling_batch(num_rows: int, temperature: float, top_k: int, top_p: float) -> SamplingBatch:
    return SamplingBatch(
        temperature=np.full(num_rows, temperature, np.float32),
        top_k=np.full(num_rows, top_k, np.int64),
        top_p=np.full(num_rows, top_p, np.float64),
        min_p=np.zeros(num_rows, np.float32),
        seeds=np.arange(num_rows, dtype=np.uint64),
        output_positions=np.zeros(num_rows, np.int64),
    )


MAKERS: dict[str, Callable[[Bench], Iterator[Case]]] = {
    "linear": make_linear_cases,
    "attention": make_attention_cases,
    "rotate": make_rotate_cases,
    "dense": make_dense_cases,
    "sampling": make_sampling_cases,
    "encoder": make_encoder_cases,
}
