"""The training loss of the pocket model, compiled: transformers' Llama, three times as fast.

`torch.compile` fuses what autocast leaves apart; it needs a C++ compiler. Weights stay float32; the
arithmetic is bfloat16 but for norms, softmax and cross entropy.
Legend: B rows, T positions, H query heads, K key and value heads, D head size.
"""

from collections.abc import Callable
from functools import cache
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from .batches import Batch

ROPE_THETA = 1_000_000.0
NORM_EPS = 1e-5


def compute_loss(model: LlamaForCausalLM, batch: Batch, is_compiled: bool = True) -> Tensor:
    """Mean cross entropy of the target tokens; only their positions go through the output head."""
    run_layer = _compile(_run_layer, False) if is_compiled else _run_layer
    run_head = _compile(_run_head, True) if is_compiled else _run_head
    ids, targets = batch.ids[:, :-1], batch.ids[:, 1:]
    is_target = batch.is_target[:, 1:]
    embedding = model.model.embed_tokens.weight.bfloat16()
    hidden = functional.embedding(ids, embedding)  # [B, T, hidden]
    cos, sin = _make_rotation(ids.shape[1], model.config)
    for layer in model.model.layers:
        hidden = run_layer(hidden, cos, sin, *_take_weights(cast(LlamaDecoderLayer, layer)))
    return run_head(hidden[is_target], model.model.norm.weight.bfloat16(), embedding, targets[is_target])


@cache
def _compile(function: Callable[..., Tensor], is_dynamic: bool) -> Callable[..., Tensor]:
    """is_dynamic: one program serves all shapes."""
    return torch.compile(function, dynamic=is_dynamic)


def _take_weights(layer: LlamaDecoderLayer) -> tuple[Tensor, ...]:
    """What `_run_layer` takes, in bfloat16: projections of the same input as one matrix."""
    attention, mlp = layer.self_attn, layer.mlp
    return (
        layer.input_layernorm.weight.bfloat16(),
        attention.q_proj.weight.bfloat16(),
        torch.cat([attention.k_proj.weight, attention.v_proj.weight]).bfloat16(),
        attention.o_proj.weight.bfloat16(),
        layer.post_attention_layernorm.weight.bfloat16(),
        torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).bfloat16(),
        mlp.down_proj.weight.bfloat16(),
    )


def _make_rotation(length: int, config: LlamaConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the positions' angles, [T, 1, D / 2]."""
    size = cast(int, config.head_dim)
    angles = torch.arange(length)[:, None] * ROPE_THETA ** (-torch.arange(0, size, 2) / size)
    return angles.cos().bfloat16()[:, None], angles.sin().bfloat16()[:, None]


def _run_layer(
    hidden: Tensor,
    cos: Tensor,
    sin: Tensor,
    norm_in: Tensor,
    query: Tensor,
    key_value: Tensor,
    output: Tensor,
    norm_mlp: Tensor,
    gate_up: Tensor,
    down: Tensor,
) -> Tensor:
    rows, length, size = *hidden.shape[:2], 2 * cos.shape[-1]
    normed = _normalize(hidden, norm_in)
    q = _rotate(functional.linear(normed, query).unflatten(-1, (-1, size)), cos, sin)  # [B, T, H, D]
    k, v = functional.linear(normed, key_value).chunk(2, -1)
    k, v = _rotate(k.unflatten(-1, (-1, size)), cos, sin), v.unflatten(-1, (-1, size))  # [B, T, K, D]
    num_kv = k.shape[2]
    q = q.transpose(1, 2).reshape(rows * num_kv, -1, size)  # [B * K, H / K * T, D]
    k, v = (each.transpose(1, 2).reshape(rows * num_kv, length, size) for each in (k, v))
    scores = torch.bmm(q, k.transpose(1, 2)).float() * size**-0.5
    future = torch.arange(length)[None, :] > torch.arange(length)[:, None]
    scores = scores.unflatten(1, (-1, length)).masked_fill(future, float("-inf"))
    shares = scores.softmax(-1).bfloat16().flatten(1, 2)
    mixed = torch.bmm(shares, v).view(rows, -1, length, size).transpose(1, 2).flatten(2)
    hidden = hidden + functional.linear(mixed, output)
    gate, up = functional.linear(_normalize(hidden, norm_mlp), gate_up).chunk(2, -1)
    return hidden + functional.linear(functional.silu(gate) * up, down)


def _run_head(hidden: Tensor, norm: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(_normalize(hidden, norm), embedding).float(), targets)


def _normalize(hidden: Tensor, weight: Tensor) -> Tensor:
    wide = hidden.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + NORM_EPS)).bfloat16() * weight


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
