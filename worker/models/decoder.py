"""The decoder that Llama, Mistral, Qwen2 and Qwen3 share (pre-norm, rotary, grouped queries, gated MLP).

The families differ only in what `ModelShape` says: biases, q/k norms, windows, rotary types, tied tables.
Tensor names are those of Hugging Face's checkpoints. Legend: T tokens, S positions to score.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...ipc.config import NATIVE_ARCHITECTURES, EngineConfig, ModelShape, Quantization
from ...ipc.errors import ModelError
from ...kernels.native import SWITCH, is_switched_off
from ..attention import QKNorm, choose_attention
from ..attention.metadata import AttentionMetadata, KVCaches
from ..first_calls import make_first_calls
from ..layers.activation import GatedActivation
from ..layers.attention import Attention
from ..layers.embedding import Embedding
from ..layers.linear import Linear, TorchLinear, make_linear
from ..layers.norm import RMSNorm
from ..layers.rotary import RotaryEmbedding
from ..weights import WeightSource, open_weights
from .native_forward import NativeForward, make_native_forward

# Why a row may depend on its neighbours, and what would end that; for Decoder.inexact_because.
INEXACT_LINEAR = "torch multiplies; a CPU with g++ has exact kernels for dtype float32 and bfloat16"
INEXACT_ATTENTION = "torch computes attention; a CPU with g++ has exact kernels for head sizes 8, 16, ... 256"

_TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class MLP:
    """down(act(gate(x)) * up(x)), gate and up in one projection."""

    def __init__(self, gate_up_proj: Linear, activation: GatedActivation, down_proj: Linear) -> None:
        self.gate_up_proj = gate_up_proj
        self.activation = activation
        self.down_proj = down_proj

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_up_proj(hidden)))


class DecoderLayer:
    """Attention and MLP, each on the normed sum of everything before it."""

    def __init__(self, input_norm: RMSNorm, attention: Attention, post_norm: RMSNorm, mlp: MLP) -> None:
        self.input_norm = input_norm
        self.attention = attention
        self.post_norm = post_norm
        self.mlp = mlp

    def __call__(
        self,
        delta: Tensor | None,
        residual: Tensor,
        angles: tuple[Tensor, Tensor],
        kv_cache: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
    ) -> tuple[Tensor, Tensor]:
        """(what this layer's MLP adds, the sum before it); `delta` is the same of the layer before."""
        if delta is None:
            normed = self.input_norm(residual)
        else:
            normed, residual = self.input_norm.add(delta, residual)
        attended = self.attention(normed, angles, kv_cache, metadata)
        normed, residual = self.post_norm.add(attended, residual)
        return self.mlp(normed), residual


class Decoder:
    """Embedding, layers, last norm and the projection to logits: a `CausalLM`."""

    def __init__(
        self,
        embedding: Embedding,
        rotary: RotaryEmbedding,
        layers: list[DecoderLayer],
        norm: RMSNorm,
        lm_head: Linear,
        weight_bytes: int,
        inexact_because: str,
    ) -> None:
        self.embedding = embedding
        self.rotary = rotary
        self.layers = layers
        self.norm = norm
        self.lm_head = lm_head
        self.weight_bytes = weight_bytes
        self.inexact_because = inexact_because
        self.is_capturable = all(layer.attention.backend.is_capturable for layer in layers)
        self.native: NativeForward | None = None

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: KVCaches,
        metadata: AttentionMetadata,
        rope_lengths: Tensor | None = None,
    ) -> Tensor:
        if self.native is not None:
            return self.native.compute_hidden(input_ids, positions, kv_caches, metadata, rope_lengths)
        angles = self.rotary(positions, rope_lengths)
        delta: Tensor | None = None
        residual = self.embedding(input_ids)  # [T, hidden]
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            delta, residual = layer(delta, residual, angles, kv_cache, metadata)
        assert delta is not None
        return self.norm.add(delta, residual)[0]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden.contiguous()).float()


def load_decoder(config: EngineConfig, device: torch.device) -> Decoder:
    """A decoder with its weights on the device. Raises ModelError."""
    shape = config.model.shape
    if shape.architecture not in NATIVE_ARCHITECTURES:
        raise ModelError("architecture", shape.architecture, f"one of {', '.join(NATIVE_ARCHITECTURES)}")
    make_first_calls()
    dtype = _TORCH_DTYPES[config.model.dtype]
    weights = open_weights(config.model, dtype, device)
    builder = _Builder(shape, weights, dtype, device, config.wants_exact, config.model.quantization)
    rotary = RotaryEmbedding(
        shape.rope, shape.head_size, shape.max_position_embeddings, config.model.max_model_len, device
    )
    decoder = builder.build(rotary)
    weights.finish()
    return decoder


class _Builder:
    """Takes tensors by their checkpoint names, fuses what is multiplied together, counts bytes."""

    def __init__(
        self,
        shape: ModelShape,
        weights: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        wants_exact: bool,
        quantization: Quantization | None,
    ) -> None:
        self._wants_exact = wants_exact
        self._quantization: Quantization | None = quantization
        self._shape = shape
        self._weights = weights
        self._dtype = dtype
        self._device = device
        self._backend = choose_attention(shape, dtype, device, is_strict=wants_exact)
        self._size_bytes = 0
        self._inexact_because = "" if self._backend.is_exact else _explain(INEXACT_ATTENTION)

    def build(self, rotary: RotaryEmbedding) -> Decoder:
        shape = self._shape
        table = self._weights.take("model.embed_tokens.weight", (shape.vocab_size, shape.hidden_size))
        self._size_bytes += table.nbytes + rotary.size_bytes
        layers = [self._layer(index) for index in range(shape.num_layers)]
        norm = self._norm("model.norm", shape.hidden_size)
        lm_head = self._lm_head(table)
        decoder = Decoder(
            Embedding(table), rotary, layers, norm, lm_head, self._size_bytes, self._inexact_because
        )
        decoder.native = make_native_forward(decoder, shape)
        return decoder

    def _layer(self, index: int) -> DecoderLayer:
        prefix, hidden = f"model.layers.{index}", self._shape.hidden_size
        return DecoderLayer(
            self._norm(f"{prefix}.input_layernorm", hidden),
            self._attention(f"{prefix}.self_attn", index),
            self._norm(f"{prefix}.post_attention_layernorm", hidden),
            self._mlp(f"{prefix}.mlp"),
        )

    def _attention(self, prefix: str, index: int) -> Attention:
        shape = self._shape
        query_size, kv_size = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
        qkv_names = [f"{prefix}.{part}_proj" for part in "qkv"]
        return Attention(
            self._linear(qkv_names, (query_size, kv_size, kv_size), shape.hidden_size, shape.qkv_bias),
            self._linear([f"{prefix}.o_proj"], (shape.hidden_size,), query_size, shape.o_bias),
            self._qk_norm(prefix),
            shape.window_of(index),
            self._backend,
        )

    def _qk_norm(self, prefix: str) -> QKNorm | None:
        if not self._shape.has_qk_norm:
            return None
        query_norm = self._norm(f"{prefix}.q_norm", self._shape.head_size)
        key_norm = self._norm(f"{prefix}.k_norm", self._shape.head_size)
        return query_norm.weight, key_norm.weight, self._shape.norm_eps

    def _mlp(self, prefix: str) -> MLP:
        hidden, width, bias = self._shape.hidden_size, self._shape.intermediate_size, self._shape.mlp_bias
        gate_up_names = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        return MLP(
            self._linear(gate_up_names, (width, width), hidden, bias),
            GatedActivation(self._shape.activation, self._dtype, self._device),
            self._linear([f"{prefix}.down_proj"], (hidden,), width, bias),
        )

    def _linear(self, names: list[str], sizes: tuple[int, ...], width: int, has_bias: bool) -> Linear:
        """One layer for projections of the same input, stacked in the order of `names`."""
        weight = self._weights.take_stacked([f"{name}.weight" for name in names], sizes, width)
        bias = None
        if has_bias:
            bias = self._weights.take_stacked([f"{name}.bias" for name in names], sizes, None)
        linear = self._make_linear(weight, bias)
        self._size_bytes += linear.size_bytes
        return linear

    def _make_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        linear = make_linear(weight, bias, self._quantization, is_strict=self._wants_exact)
        if not linear.is_exact:
            self._inexact_because = _explain(INEXACT_LINEAR)
        return linear

    def _norm(self, name: str, size: int) -> RMSNorm:
        weight = self._weights.take(f"{name}.weight", (size,))
        self._size_bytes += weight.nbytes
        return RMSNorm(weight, self._shape.norm_eps)

    def _lm_head(self, table: Tensor) -> Linear:
        """The projection to logits: its own weight, or the embedding's table where config.json ties the two.

        A tied checkpoint may hold a second copy, which is not read.
        """
        name = "lm_head.weight"
        if self._shape.tie_word_embeddings:
            self._weights.skip(name)
            linear = self._make_linear(table)
        else:
            weight = self._weights.take(name, (self._shape.vocab_size, self._shape.hidden_size))
            linear = self._make_linear(weight)
        if not (isinstance(linear, TorchLinear) and linear.weight is table):
            self._size_bytes += linear.size_bytes
        return linear


def _explain(reason: str) -> str:
    """The reason, and the switch if that is in it."""
    return f"{reason}; {SWITCH}=0 keeps them off" if is_switched_off() else reason
