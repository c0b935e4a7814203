"""From an EngineConfig to a decoder with its weights on a device: tensors by name, fused, packed, counted."""

from __future__ import annotations

import torch
from msgspec.structs import replace
from torch import Tensor

from ...ipc.config import EngineConfig, Quantization
from ...ipc.model_spec import AttentionSpec, DenseSpec, ExpertsSpec, LayerSpec
from ...kernels.native import SWITCH, is_switched_off
from ..attention import AttentionBackend, QKNorm, make_attention
from ..first_calls import make_first_calls
from ..layers.activation import GatedActivation
from ..layers.attention import Attention
from ..layers.embedding import Embedding
from ..layers.feed_forward import MLP, Experts, FeedForward
from ..layers.linear import Linear, TorchLinear, make_linear
from ..layers.logits import LogitsHead
from ..layers.norm import NoNorm, RMSNorm
from ..layers.rotary import RotaryEmbedding
from ..threads import MAX_SINGLE_THREAD_WEIGHT_BYTES
from ..weights import WeightSource, open_weights
from .coverage import check_covered
from .decoder import Decoder, DecoderLayer
from .native_forward import make_native_forward

# Why a row may depend on the rows beside it, and what avoids that; for Decoder.batch_variance_reason.
INEXACT_LINEAR = "torch multiplies; a CPU with g++ has exact kernels for dtype float32 and bfloat16"
INEXACT_ATTENTION = "torch computes attention; a CPU with g++ has exact kernels for head sizes 8, 16, ... 256"


def load_model(config: EngineConfig, device: torch.device) -> Decoder:
    """Build what `config.model.spec` says and load its weights (or random ones).

    Raises ModelError: a field of the spec that nothing here computes, or weights that are missing, corrupt or
    of a wrong shape.
    """
    spec = config.model.spec
    check_covered(spec)
    make_first_calls()
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    weights = open_weights(config.model, dtype, device)
    decoder = _Builder(config, weights, dtype, device).build()
    weights.finish()
    return decoder


class _Builder:
    """Takes tensors by their checkpoint names, fuses what is multiplied together, counts bytes."""

    def __init__(
        self, config: EngineConfig, weights: WeightSource, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._spec = config.model.spec
        self._max_model_len = config.model.max_model_len
        self._wants_exact = config.wants_exact
        self._quantization: Quantization | None = config.model.quantization
        self._weights = weights
        self._dtype = dtype
        self._device = device
        self._backends: dict[tuple[int, int, int], AttentionBackend] = {}
        self._size_bytes = 0
        self._batch_variance_reason = ""

    def build(self) -> Decoder:
        spec = self._spec
        rotary = self._rotary()
        table = self._weights.take("model.embed_tokens.weight", (spec.vocab_size, spec.hidden_size))
        self._size_bytes += table.nbytes + rotary.size_bytes
        layers = [self._layer(f"model.layers.{index}", layer) for index, layer in enumerate(spec.layers)]
        norm = self._norm("model.norm", spec.hidden_size)
        head = LogitsHead(self._lm_head(table), spec.vocab_size, spec.logit_soft_cap)
        embedding = Embedding(table, spec.embedding_scale)
        decoder = Decoder(
            embedding, rotary, layers, norm, head, self._size_bytes, self._batch_variance_reason
        )
        splits_tokens = decoder.weight_bytes <= MAX_SINGLE_THREAD_WEIGHT_BYTES
        decoder.native = make_native_forward(decoder.emit, spec, table, rotary, splits_tokens)
        return decoder

    def _rotary(self) -> RotaryEmbedding:
        spec = self._spec
        head_size = spec.layers[0].attention.head_size
        return RotaryEmbedding(
            spec.rope, head_size, spec.max_position_embeddings, self._max_model_len, self._device
        )

    def _layer(self, prefix: str, spec: LayerSpec) -> DecoderLayer:
        return DecoderLayer(
            self._layer_norm(prefix, spec.attention_norm),
            self._attention(f"{prefix}.self_attn", spec.attention),
            self._layer_norm(prefix, spec.attention_out_norm),
            self._layer_norm(prefix, spec.ffn_norm),
            self._feed_forward(prefix, spec.ffn),
            self._layer_norm(prefix, spec.ffn_out_norm),
        )

    def _attention(self, prefix: str, spec: AttentionSpec) -> Attention:
        hidden, sizes = self._spec.hidden_size, (spec.query_size, spec.kv_size, spec.kv_size)
        qkv_names = [f"{prefix}.{part}_proj" for part in "qkv"]
        return Attention(
            spec,
            self._linear(qkv_names, sizes, hidden, spec.qkv_bias),
            self._linear([f"{prefix}.o_proj"], (hidden,), spec.query_size, spec.o_bias),
            *self._qk_norms(prefix, spec),
            self._backend(spec),
        )

    def _backend(self, spec: AttentionSpec) -> AttentionBackend:
        """One for all layers with the same heads."""
        heads = spec.num_heads, spec.num_kv_heads, spec.head_size
        if heads not in self._backends:
            backend = make_attention(spec, self._dtype, self._device, is_strict=self._wants_exact)
            if not backend.is_exact:
                self._batch_variance_reason = self._batch_variance_reason or _explain(INEXACT_ATTENTION)
            self._backends[heads] = backend
        return self._backends[heads]

    def _qk_norms(self, prefix: str, spec: AttentionSpec) -> tuple[QKNorm | None, tuple[RMSNorm, ...]]:
        """Norms of each head by itself, and of all queries and all keys; a model has one of them or none."""
        if spec.qk_norm is None:
            return None, ()
        is_each_head = spec.qk_norm == "each_head"
        sizes = (spec.head_size, spec.head_size) if is_each_head else (spec.query_size, spec.kv_size)
        query, key = (
            self._norm(f"{prefix}.{part}_norm", size) for part, size in zip("qk", sizes, strict=True)
        )
        return ((query.weight, key.weight, self._spec.norm_eps), ()) if is_each_head else (None, (query, key))

    def _feed_forward(self, prefix: str, spec: DenseSpec | ExpertsSpec) -> FeedForward:
        if isinstance(spec, DenseSpec):
            return self._mlp(prefix, spec)
        names = [
            [name.format(e) for name in (spec.gate, spec.up, spec.down)] for e in range(spec.num_experts)
        ]
        experts = [self._mlp(prefix, replace(spec, gate=g, up=u, down=d)) for g, u, d in names]
        # A rounding in the router may send a token to another expert, so its weight is never quantized.
        name, shape = f"{prefix}.{spec.router}.weight", (spec.num_experts, self._spec.hidden_size)
        router = self._make_linear(self._weights.take(name, shape), is_quantized=False)
        self._size_bytes += router.size_bytes
        return Experts(spec, router, experts)

    def _mlp(self, prefix: str, spec: DenseSpec | ExpertsSpec) -> MLP:
        hidden, width = self._spec.hidden_size, spec.intermediate_size
        has_bias = isinstance(spec, DenseSpec) and spec.bias
        gate_up_names = [f"{prefix}.{spec.gate}", f"{prefix}.{spec.up}"]
        return MLP(
            self._linear(gate_up_names, (width, width), hidden, has_bias),
            GatedActivation(spec.activation, self._dtype, self._device),
            self._linear([f"{prefix}.{spec.down}"], (hidden,), width, has_bias),
            width,
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

    def _make_linear(self, weight: Tensor, bias: Tensor | None = None, is_quantized: bool = True) -> Linear:
        quantization = self._quantization if is_quantized else None
        linear = make_linear(weight, bias, quantization, is_strict=self._wants_exact)
        if not linear.is_exact:
            self._batch_variance_reason = _explain(INEXACT_LINEAR)
        return linear

    def _layer_norm(self, prefix: str, name: str | None) -> RMSNorm | NoNorm:
        hidden = self._spec.hidden_size
        return NoNorm(hidden) if name is None else self._norm(f"{prefix}.{name}", hidden)

    def _norm(self, name: str, size: int) -> RMSNorm:
        spec, weight = self._spec, self._weights.take(f"{name}.weight", (size,))
        self._size_bytes += weight.nbytes
        return RMSNorm(weight, spec.norm_eps, spec.norm_weight_offset, spec.norm_rounds_normed)

    def _lm_head(self, table: Tensor) -> Linear:
        """The projection to logits: its own weight, or the embedding's table where config.json ties the two.

        A tied checkpoint may hold a second copy, which is not read.
        """
        name = "lm_head.weight"
        if self._spec.tie_word_embeddings:
            self._weights.skip(name)
            linear = self._make_linear(table)
        else:
            weight = self._weights.take(name, (self._spec.vocab_size, self._spec.hidden_size))
            linear = self._make_linear(weight)
        if not (isinstance(linear, TorchLinear) and linear.weight is table):
            self._size_bytes += linear.size_bytes
        return linear


def _explain(reason: str) -> str:
    """The reason, and the switch if that is in it."""
    return f"{reason}; {SWITCH}=0 keeps them off" if is_switched_off() else reason
