"""The operations of an encoder in `quire bench kernels`: a layer of bge-small, over a step of prompts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional as F

from ...ipc.spec.model_spec import AttentionSpec
from ...kernels.norm.layer_norm import layer_norm_reference
from ...worker.attention import make_attention
from ...worker.layers.linear import make_linear
from ...worker.layers.norm import LayerNorm
from .kernel_case import Bench, Case

_HIDDEN_SIZE, _INTERMEDIATE_SIZE = 384, 1536
_ATTENTION = AttentionSpec(num_heads=12, num_kv_heads=12, head_size=32, is_causal=False)
_NUM_PROMPTS, _PROMPT_LEN = 16, 128
_EPS = 1e-12


def make_encoder_cases(bench: Bench) -> Iterator[Case]:
    """All are resident: a layer's weights stay in a cache while a step's tokens pass."""
    for dtype in (torch.bfloat16, torch.float32):
        for name, num_in, num_out, activation in (
            ("qkv", _HIDDEN_SIZE, _ATTENTION.qkv_size, None),
            ("up + gelu", _HIDDEN_SIZE, _INTERMEDIATE_SIZE, "gelu"),
            ("down", _INTERMEDIATE_SIZE, _HIDDEN_SIZE, None),
        ):
            yield _make_linear(bench, name, num_in, num_out, activation, dtype)
        yield _make_attention(bench, dtype)
        yield _make_norm(bench, dtype)


def _make_linear(
    bench: Bench, name: str, num_in: int, num_out: int, activation: str | None, dtype: torch.dtype
) -> Case:
    num_tokens = _NUM_PROMPTS * _PROMPT_LEN
    weight, bias = bench.noise(num_out, num_in, dtype=dtype), bench.noise(num_out, dtype=dtype)
    x = bench.noise(num_tokens, num_in, dtype=dtype) * num_in**-0.5
    layer = make_linear(weight.clone(), bias)
    layer.activation = activation

    def compute_by_torch() -> torch.Tensor:
        y = F.linear(x, weight, bias)
        return y if activation is None else F.gelu(y)

    return Case(
        op="encoder linear",
        shape=f"{name} {num_in} x {num_out}, m {num_tokens}",
        dtype=dtype,
        calls=[lambda: layer(x)],
        torch_calls=[compute_by_torch],
        num_bytes=weight.nbytes + x.nbytes + num_tokens * num_out * x.element_size(),
        num_flops=2 * num_tokens * num_in * num_out,
        is_resident=True,
    )


def _make_attention(bench: Bench, dtype: torch.dtype) -> Case:
    """Torch's column has the prompts as a batch, which these of one length are without padding."""
    spec, lengths = _ATTENTION, [_PROMPT_LEN] * _NUM_PROMPTS
    metadata = bench.make_step(lengths, lengths)
    backend = make_attention(spec, dtype, bench.device)
    qkv = bench.noise(sum(lengths), spec.qkv_size, dtype=dtype)
    cache = bench.make_cache(spec, metadata, dtype)
    heads = qkv.view(_NUM_PROMPTS, _PROMPT_LEN, -1, spec.head_size).transpose(1, 2)
    query, key, value = heads.chunk(3, dim=1)
    return Case(
        op="encoder attention",
        shape=f"{_NUM_PROMPTS} x {_PROMPT_LEN}",
        dtype=dtype,
        calls=[lambda: backend.attend(qkv, cache, metadata, spec)],
        torch_calls=[lambda: F.scaled_dot_product_attention(query, key, value)],
        num_bytes=qkv.nbytes * 4 // 3,
        num_flops=4 * _NUM_PROMPTS * _PROMPT_LEN**2 * spec.query_size,
        is_resident=True,
    )


def _make_norm(bench: Bench, dtype: torch.dtype) -> Case:
    x, residual = (bench.noise(_NUM_PROMPTS * _PROMPT_LEN, _HIDDEN_SIZE, dtype=dtype) for _ in range(2))
    zeros, weight = torch.zeros_like(x), torch.ones(_HIDDEN_SIZE, dtype=dtype, device=bench.device)
    layer = LayerNorm(weight, weight, _EPS)
    return Case(
        op="layer norm + residual",
        shape=f"T {len(x)} x {_HIDDEN_SIZE}",
        dtype=dtype,
        calls=[lambda: layer.add(zeros, residual)],
        torch_calls=[lambda: layer_norm_reference(residual + zeros, weight, weight, _EPS)],
        num_bytes=4 * x.nbytes,
        is_resident=True,
    )
