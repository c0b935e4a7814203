"""The rows of `quire bench kernels`: the operations in the shapes of models, as the worker runs them.

The forms are those that the worker's own choosers pick for the device (C++ on a CPU, Triton on CUDA, torch
elsewhere), beside torch. Weights and caches rotate through more memory than a cache holds, as they do in a
model; activations stay where the operation before has left them. Legend: T or m tokens, K in, N out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ...ipc.spec.model_spec import AttentionSpec, KVCacheDtype, ModelSpec
from ...ipc.spec.weight_format import Quantization, make_online_formats
from ...kernels.attention.narrow_cache import SCALE_SIZE
from ...kernels.attention.paged_attention import paged_attention_reference
from ...kernels.attention.rotate_and_write import rotate_and_write_reference
from ...kernels.linear.gated_activation import gated_activation_reference
from ...kernels.norm.layer_norm import layer_norm_reference
from ...kernels.norm.rms_norm import add_rms_norm_reference
from ...kernels.program.gather_rows import gather_rows_reference
from ...worker.attention import QKNorm, make_attention
from ...worker.layers.embedding import Embedding
from ...worker.layers.feed_forward import GatedActivation
from ...worker.layers.linear import make_linear
from ...worker.layers.norm import LayerNorm, RMSNorm
from ...worker.sampling.sampler import LogprobGroup, SamplingBatch, sample
from ...worker.weights.online import quantize
from .bench_model import load_spec
from .kernel_case import Bench, Case, copy_cache

_TINY, _QWEN3_600M, _LLAMA_8B = (load_spec(name) for name in ("tiny", "small", "llama-8b"))
_MODELS = (("", _QWEN3_600M), ("tiny ", _TINY))
_ROWS = (1, 8, 32, 256, 1024)
_NARROW_ROWS = (1, 2, 4, 8, 32, 256, 1024)  # such weights are read faster than they are multiplied
_INT4: torch.dtype = torch.uint4  # pyright: ignore[reportAttributeAccessIssue]
_NARROW: dict[torch.dtype, Quantization] = {_INT4: "int4", torch.int8: "int8"}
_EPS = 1e-6
_MAX_INDEXES = 2048  # of the embedding's rows, which are spread over a table of 311 MB
# A layer of bge-small, over a step of prompts.
_ENCODER_HIDDEN, _ENCODER_FFN = 384, 1536
_ENCODER_ATTENTION = AttentionSpec(num_heads=12, num_kv_heads=12, head_size=32, is_causal=False)
_NUM_PROMPTS, _PROMPT_LEN = 16, 128


def _list_linears(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """(K, N) of a model's projections, fused as the worker fuses them."""
    attention, ffn_size = spec.layers[0].attention, spec.layers[0].ffn.intermediate_size
    return {
        "qkv": (spec.hidden_size, attention.qkv_size),
        "o": (attention.query_size, spec.hidden_size),
        "gate_up": (spec.hidden_size, 2 * ffn_size),
        "down": (ffn_size, spec.hidden_size),
        "head": (spec.hidden_size, spec.vocab_size),
    }


def make_linear_cases(bench: Bench) -> Iterator[Case]:
    """bfloat16, int4 and int8 weights and float32, from a single row to a prompt's."""
    small = _list_linears(_QWEN3_600M)
    for name, size in small.items():
        yield from _make_linear(bench, name, size, _ROWS)
    for dtype in (*_NARROW, torch.float32):
        yield from _make_linear(
            bench, "gate_up", small["gate_up"], _NARROW_ROWS if dtype in _NARROW else _ROWS, dtype
        )
    for name, size in list(_list_linears(_TINY).items())[:3]:
        yield from _make_linear(bench, f"tiny {name}", size, (1, 32, 256), is_resident=True)
    if bench.device.type == "cuda":  # a model that fills a GPU, and rows that do not depend on the batch
        for name, size in _list_linears(_LLAMA_8B).items():
            yield from _make_linear(bench, f"8B {name}", size, (1, 256))
        yield from _make_linear(bench, "exact gate_up", small["gate_up"], _ROWS, is_exact=True)


def _make_linear(
    bench: Bench,
    name: str,
    size: tuple[int, int],
    rows: Sequence[int],
    dtype: torch.dtype = torch.bfloat16,
    is_resident: bool = False,
    is_exact: bool = False,
    activation: str | None = None,
    has_bias: bool = False,
) -> Iterator[Case]:
    """`dtype` is the weight's; torch's column for narrow weights is bfloat16, which they stand in for."""
    (num_in, num_out), narrow = size, _NARROW.get(dtype)
    x_dtype = dtype if narrow is None else torch.bfloat16
    weight = bench.noise(num_out, num_in, dtype=x_dtype)
    bias = bench.noise(num_out, dtype=x_dtype) if has_bias else None
    format = None if narrow is None else make_online_formats(narrow, narrow).default
    stored = weight if format is None else quantize(weight, format)
    num_bytes = weight.nbytes if format is None else format.count_bytes(num_out, num_in)
    sizes = (num_bytes, weight.nbytes)
    num_layers, num_plain = (1 if is_resident else bench.count_copies(count) for count in sizes)
    plain = [weight.clone() for _ in range(num_plain)]
    layers = [make_linear(stored, bias, x_dtype, is_exact) for _ in range(num_layers)]
    for layer in layers:
        layer.activation = activation

    def compute_by_torch(x: Tensor, weight: Tensor) -> Tensor:
        y = F.linear(x, weight, bias)
        return y if activation is None else F.gelu(y)

    for m in rows:
        x = bench.noise(m, num_in, dtype=x_dtype) * (num_in**-0.5 if has_bias else 1.0)
        yield Case(
            op="encoder linear" if has_bias else "linear",
            shape=f"{name} {num_in} x {num_out}, m {m}",
            dtype=dtype,
            calls=[lambda layer=layer, x=x: layer(x) for layer in layers],
            torch_calls=[lambda other=other, x=x: compute_by_torch(x, other) for other in plain],
            num_bytes=num_bytes + x.nbytes + m * num_out * x.element_size(),
            num_flops=2 * m * num_in * num_out,
            is_resident=is_resident,
        )


def make_attention_cases(bench: Bench) -> Iterator[Case]:
    """Decoding batches, and prompts of one request."""
    is_gpu, spec, tiny = bench.device.type == "cuda", *(m.layers[0].attention for _, m in _MODELS)
    for batch, length in ((1, 2048), (32, 512), (64, 4096 if is_gpu else 2048)):
        yield _make_decode(bench, spec, batch, length)
    if is_gpu:  # too large for a CPU's memory
        large = _LLAMA_8B.layers[0].attention
        yield _make_decode(bench, large, 64, 4096, name="8b ")
        yield _make_prefill(bench, large, 1, 8192, torch.bfloat16, "8b ")
    for batch, length in ((64, 4096 if is_gpu else 2048), (1, 8192)):
        for kv_dtype in ("auto", "int8") if batch == 1 else ("int8",):
            yield _make_decode(bench, spec, batch, length, kv_dtype=kv_dtype)
    yield _make_decode(bench, spec, 32, 512, torch.float32)
    yield _make_decode(bench, tiny, 1, 256, name="tiny ")
    yield _make_decode(bench, tiny, 256, 64, name="tiny ")
    for length in (512, 8192 if is_gpu else 2048):
        yield _make_prefill(bench, spec, 1, length, torch.bfloat16)
    yield _make_prefill(bench, spec, 1, 512, torch.float32)


def _make_decode(
    bench: Bench,
    spec: AttentionSpec,
    batch: int,
    length: int,
    dtype: torch.dtype = torch.bfloat16,
    name: str = "",
    kv_dtype: KVCacheDtype = "auto",
) -> Case:
    metadata = bench.make_step([1] * batch, [length] * batch)
    backend = make_attention(spec, dtype, bench.device, kv_cache_dtype=kv_dtype)
    qkv = bench.noise(batch, spec.qkv_size, dtype=dtype)
    query = qkv[:, : spec.query_size].reshape(batch, spec.num_heads, spec.head_size)
    each = spec.kv_size * qkv.element_size()
    if kv_dtype != "auto":
        each = spec.num_kv_heads * (spec.head_size + SCALE_SIZE)
    num_bytes = 2 * batch * length * each
    is_resident = name == "tiny "
    count = 1 if is_resident else bench.count_copies(num_bytes)
    first = bench.make_cache(spec, metadata, dtype, kv_dtype)
    caches = [first, *(copy_cache(first) for _ in range(count - 1))]
    lists = metadata.query_starts_list(), metadata.seq_lens_list()
    return Case(
        op="paged attention",
        shape=f"{name}decode {batch} x {length}" + (f", {kv_dtype}" if kv_dtype != "auto" else ""),
        dtype=dtype,
        calls=[lambda cache=cache: backend.attend(qkv, cache, metadata, spec) for cache in caches],
        torch_calls=[
            lambda cache=cache: paged_attention_reference(query, *cache, metadata.block_tables, *lists, None)
            for cache in caches
        ],
        num_bytes=num_bytes,
        num_flops=4 * batch * length * spec.query_size,
        is_resident=is_resident,
    )


def _make_prefill(
    bench: Bench, spec: AttentionSpec, batch: int, length: int, dtype: torch.dtype, name: str = ""
) -> Case:
    """Torch's column is its dense attention, over a batch without padding: it has no paged form."""
    metadata = bench.make_step([length] * batch, [length] * batch)
    backend = make_attention(spec, dtype, bench.device)
    qkv = bench.noise(batch * length, spec.qkv_size, dtype=dtype)
    cache = bench.make_cache(spec, metadata, dtype)
    heads = qkv.view(batch, length, -1, spec.head_size).transpose(1, 2)
    query, key, value = heads.split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), dim=1)
    num_pairs = length * (length + 1) // 2 if spec.is_causal else length**2
    how: dict[str, Any] = {"is_causal": spec.is_causal, "enable_gqa": spec.num_heads != spec.num_kv_heads}
    return Case(
        op="paged attention" if spec.is_causal else "encoder attention",
        shape=f"{name}prefill {length}" if spec.is_causal else f"{batch} x {length}",
        dtype=dtype,
        calls=[lambda: backend.attend(qkv, cache, metadata, spec)],
        torch_calls=[lambda: F.scaled_dot_product_attention(query, key, value, **how)],
        num_bytes=qkv.nbytes * 2 if spec.is_causal else qkv.nbytes * 4 // 3,
        num_flops=4 * batch * num_pairs * spec.query_size,
        is_resident=not spec.is_causal,
    )


def make_rotate_cases(bench: Bench) -> Iterator[Case]:
    """Norm of q and k by head, rotation, and the write to the cache."""
    dtype = torch.bfloat16
    for num_tokens, (name, model) in ((1, _MODELS[0]), (32, _MODELS[0]), (512, _MODELS[0]), (1, _MODELS[1])):
        spec = model.layers[0].attention
        metadata = bench.make_step([num_tokens], [num_tokens])
        backend = make_attention(spec, dtype, bench.device)
        qkv = bench.noise(num_tokens, spec.qkv_size, dtype=dtype)
        cache = bench.make_cache(spec, metadata, dtype)
        angles = torch.rand(num_tokens, spec.head_size // 2, device=bench.device)
        turn = angles.cos(), angles.sin()
        weight = torch.ones(spec.head_size, dtype=dtype, device=bench.device)
        norm = QKNorm(weight, weight, _EPS) if spec.qk_norm else None
        ours = (qkv, turn, norm, cache, metadata)
        theirs = (qkv, spec.num_heads, *turn, norm, *cache, metadata.slot_mapping)
        kv_share = 2 * spec.kv_size / spec.qkv_size
        yield Case(
            op="rotate and write",
            shape=f"{name}T {num_tokens}",
            dtype=dtype,
            calls=[lambda backend=backend, ours=ours: backend.rotate_and_write(*ours)],
            torch_calls=[lambda theirs=theirs: rotate_and_write_reference(*theirs)],
            # q and k are written in place, k and v to the cache.
            num_bytes=int(qkv.nbytes * (2 + kv_share / 2)) + sum(part.nbytes for part in turn),
            is_resident=True,
        )


def make_dense_cases(bench: Bench) -> Iterator[Case]:
    """The norm with its residual, the gated activation, and the embedding."""
    for name, model in _MODELS:
        for num_tokens in (1, 256):
            yield _make_norm(bench, f"{name}T", num_tokens, model.hidden_size, torch.bfloat16)
    for name, model in _MODELS:
        for num_tokens in (1, 256):
            yield _make_activation(bench, name, model.layers[0].ffn.intermediate_size, num_tokens)
    for num_tokens in (1, 256):
        yield _make_embedding(bench, _QWEN3_600M, num_tokens)


def _make_norm(
    bench: Bench, name: str, num_tokens: int, size: int, dtype: torch.dtype, is_layer_norm: bool = False
) -> Case:
    x, residual = (bench.noise(num_tokens, size, dtype=dtype) for _ in range(2))
    zeros = torch.zeros_like(x)  # added in place again and again
    weight = torch.ones(size, dtype=dtype, device=bench.device)
    layer = LayerNorm(weight, weight, _EPS) if is_layer_norm else RMSNorm(weight, _EPS)

    def compute_by_torch() -> object:
        if is_layer_norm:
            return layer_norm_reference(residual + zeros, weight, weight, _EPS)
        return add_rms_norm_reference(zeros, residual, weight, _EPS)

    return Case(
        op="layer norm + residual" if is_layer_norm else "rms norm + residual",
        shape=f"{name} {num_tokens} x {size}",
        dtype=dtype,
        calls=[lambda: layer.add(zeros, residual)],
        torch_calls=[compute_by_torch],
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


def _make_embedding(bench: Bench, spec: ModelSpec, num_tokens: int) -> Case:
    table = bench.noise(spec.vocab_size, spec.hidden_size, dtype=torch.bfloat16)
    layer = Embedding(table)
    num_bytes = num_tokens * spec.hidden_size * table.element_size()  # read; the output stays in a cache
    count = min(_MAX_INDEXES, bench.count_copies(num_bytes))
    indexes = [torch.randint(spec.vocab_size, (num_tokens,), device=bench.device) for _ in range(count)]
    return Case(
        op="embedding",
        shape=f"T {num_tokens} of {spec.vocab_size} x {spec.hidden_size}",
        dtype=torch.bfloat16,
        calls=[lambda index=index: layer(index, index) for index in indexes],
        torch_calls=[lambda index=index: gather_rows_reference(table, index) for index in indexes],
        num_bytes=num_bytes,
    )


def make_sampling_cases(bench: Bench) -> Iterator[Case]:
    """Greedy, by temperature, with filters and logprobs. Torch's column is its usual form of the same."""
    for num_rows, (name, model) in ((1, _MODELS[0]), (32, _MODELS[0]), (256, _MODELS[1])):
        logits = bench.noise(num_rows, model.vocab_size, dtype=torch.float32) * 3
        for kind, temperature, top_k, top_p, num_logprobs, other in (
            ("greedy", 0.0, model.vocab_size, 1.0, None, _torch_greedy),
            ("temperature", 1.0, model.vocab_size, 1.0, None, _torch_random),
            ("top-k 50, top-p 0.9", 1.0, 50, 0.9, None, _torch_filtered),
            ("top-p 0.95", 1.0, model.vocab_size, 0.95, None, _torch_top_p),
            ("greedy, logprobs 0", 0.0, model.vocab_size, 1.0, 0, _torch_logprobs),
            ("greedy, logprobs 20", 0.0, model.vocab_size, 1.0, 20, _torch_logprobs),
        ):
            rows = list(range(num_rows))
            batch = SamplingBatch(
                temperature=np.full(num_rows, temperature, np.float32),
                top_k=np.full(num_rows, top_k, np.int64),
                top_p=np.full(num_rows, top_p, np.float64),
                min_p=np.zeros(num_rows, np.float32),
                seeds=np.arange(num_rows, dtype=np.uint64),
                output_positions=np.zeros(num_rows, np.int64),
                logprob_groups=[] if num_logprobs is None else [LogprobGroup(num_logprobs, rows)],
            )
            yield Case(
                op="sampling",
                shape=f"{name}{kind}, {num_rows} x {model.vocab_size}",
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


def _torch_top_p(logits: Tensor) -> Tensor:
    weights, index = logits.softmax(-1).sort(-1, descending=True)
    weights = weights.masked_fill(weights.cumsum(-1) - weights > 0.95, 0.0)
    return index.gather(1, torch.multinomial(weights, 1))


def _torch_logprobs(logits: Tensor) -> object:
    return logits.log_softmax(-1).topk(20, -1)


def make_encoder_cases(bench: Bench) -> Iterator[Case]:
    """All are resident: a layer's weights stay in a cache while a step's tokens pass."""
    num_tokens, hidden, ffn_size = _NUM_PROMPTS * _PROMPT_LEN, _ENCODER_HIDDEN, _ENCODER_FFN
    for dtype in (torch.bfloat16, torch.float32):
        for name, size, activation in (
            ("qkv", (hidden, _ENCODER_ATTENTION.qkv_size), None),
            ("up + gelu", (hidden, ffn_size), "gelu"),
            ("down", (ffn_size, hidden), None),
        ):
            how: dict[str, Any] = {"is_resident": True, "has_bias": True, "activation": activation}
            yield from _make_linear(bench, name, size, (num_tokens,), dtype, **how)
        yield _make_prefill(bench, _ENCODER_ATTENTION, _NUM_PROMPTS, _PROMPT_LEN, dtype)
        yield _make_norm(bench, "T", num_tokens, hidden, dtype, is_layer_norm=True)


MAKERS: dict[str, Callable[[Bench], Iterator[Case]]] = {
    "linear": make_linear_cases,
    "attention": make_attention_cases,
    "rotate": make_rotate_cases,
    "dense": make_dense_cases,
    "sampling": make_sampling_cases,
    "encoder": make_encoder_cases,
}
