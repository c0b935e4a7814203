"""ModelSpec: what a decoder computes, layer by layer, in one vocabulary for all families.

`frontend/families` makes it of config.json; the worker builds its layers from it and refuses a field that
they do not cover. Sizes that others plan with (KV bytes, weights, activations) are asked of it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Dtype = Literal["float32", "bfloat16", "float16"]
RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]
Activation = Literal["silu", "gelu", "gelu_tanh"]

DTYPE_SIZE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Rotary embedding. Scaling fields mean what transformers' `rope_parameters` means by them."""

    theta: float = 10000.0
    type: RopeType = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float | None = None  # yarn
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn


class AttentionSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Causal self-attention of one layer over grouped heads."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    window: int | None = None  # tokens: a query sees itself and window - 1 before; None: all
    scale: float | None = None  # of scores; None: 1 / sqrt(head_size)
    soft_cap: float | None = None  # a score s becomes cap * tanh(s / cap)
    qkv_bias: bool = False
    o_bias: bool = False
    # Of queries and keys before rotation: of each head by itself, or of all heads of a token together.
    qk_norm: Literal["each_head", "all_heads"] | None = None

    @property
    def query_size(self) -> int:
        """Numbers of a token's queries."""
        return self.num_heads * self.head_size

    @property
    def kv_size(self) -> int:
        """Numbers of a token's keys, and of its values."""
        return self.num_kv_heads * self.head_size

    @property
    def qkv_size(self) -> int:
        """Numbers of a token's queries, keys and values."""
        return self.query_size + 2 * self.kv_size

    def count_params(self, hidden_size: int) -> int:
        """Weights of the four projections."""
        return hidden_size * (self.query_size + self.qkv_size)


class DenseSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="dense"):
    """down(act(gate(x)) * up(x)). Names are those of the tensors, after the layer's prefix."""

    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"

    def count_active_params(self, hidden_size: int) -> int:
        """Weights that one token is multiplied with."""
        return 3 * hidden_size * self.intermediate_size

    def count_activations(self, hidden_size: int) -> int:  # noqa: ARG002
        """Numbers that one token holds between the layer's input and output."""
        return 3 * self.intermediate_size


class ExpertsSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="experts"):
    """Some of many feed-forward networks a token: those to which the router's softmax gives the most.

    Their results are added by these weights, which are scaled to a sum of 1 if `norm_topk_prob`. In the names
    of an expert's tensors {} is its number.
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    activation: Activation = "silu"
    norm_topk_prob: bool = True
    router: str = "mlp.gate"
    gate: str = "mlp.experts.{}.gate_proj"
    up: str = "mlp.experts.{}.up_proj"
    down: str = "mlp.experts.{}.down_proj"

    def count_active_params(self, hidden_size: int) -> int:
        """Weights that one token is multiplied with."""
        return hidden_size * (3 * self.intermediate_size * self.num_experts_per_tok + self.num_experts)

    def count_activations(self, hidden_size: int) -> int:
        """Numbers that one token holds between the layer's input and output."""
        return self.num_experts + self.num_experts_per_tok * (hidden_size + 3 * self.intermediate_size + 3)


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """h += out_norm(attention(norm(h))), then the same with the feed-forward part.

    The norms are named by their tensors, after the layer's prefix; without a name there is none.
    """

    attention: AttentionSpec
    ffn: DenseSpec | ExpertsSpec
    attention_norm: str | None = "input_layernorm"
    attention_out_norm: str | None = None
    ffn_norm: str | None = "post_attention_layernorm"
    ffn_out_norm: str | None = None


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A decoder: embedding, layers, last norm, projection to logits."""

    architecture: str  # as config.json names it; a label, nothing follows from it
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float = 1e-6
    # Of all norms but those of each head: x / rms is rounded to the model's type if `norm_rounds_normed`, and
    # multiplied by offset + weight.
    norm_weight_offset: float = 0.0
    norm_rounds_normed: bool = True
    max_position_embeddings: int = 2048
    rope: RopeConfig = RopeConfig()
    embedding_scale: float | None = None  # multiplies the embeddings, itself rounded to their type
    logit_soft_cap: float | None = None
    tie_word_embeddings: bool = False

    @property
    def num_layers(self) -> int:
        """How many layers there are."""
        return len(self.layers)

    def kv_bytes_per_token(self, dtype: Dtype) -> int:
        """Bytes of KV cache that one token takes over all layers."""
        return sum(2 * layer.attention.kv_size for layer in self.layers) * DTYPE_SIZE_BYTES[dtype]

    @property
    def num_active_params(self) -> int:
        """Weights that a token's pass uses: all but those of other tokens' experts, norms and biases."""
        hidden, num_tables = self.hidden_size, 1 if self.tie_word_embeddings else 2
        return num_tables * self.vocab_size * hidden + sum(
            layer.attention.count_params(hidden) + layer.ffn.count_active_params(hidden)
            for layer in self.layers
        )

    @property
    def num_activations_per_token(self) -> int:
        """Upper estimate of the numbers that a token holds at once on its way through a layer."""
        # Residual, normed, attention's output and a copy; beside what each part holds.
        return 4 * self.hidden_size + max(
            layer.attention.query_size
            + layer.attention.qkv_size
            + layer.ffn.count_activations(self.hidden_size)
            for layer in self.layers
        )
