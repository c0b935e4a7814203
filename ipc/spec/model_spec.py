"""ModelSpec: what a decoder or encoder computes, layer by layer, in one vocabulary for all families.

`frontend/models/families` makes it of config.json; the worker builds its layers from it and refuses a field
that they do not cover. Sizes that others plan with (KV bytes, weights, activations) are asked of it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import accumulate
from typing import Literal

import msgspec
from msgspec.structs import replace

from ..params.pooling_params import PoolingTask
from .generic_spec import GenericSpec
from .recurrent_spec import RecurrentSpec, round_up
from .weight_format import WeightFormats

Dtype = Literal["float32", "bfloat16", "float16"]
# fp8_e4m3: vLLM's other name of fp8.
KVCacheDtype = Literal["auto", "int8", "fp8", "fp8_e4m3"]
RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "clamped_swiglu", "relu2"]
NormKind = Literal["rms", "layer"]
Pool = Literal["cls", "last", "mean", "max", "weighted_mean", "mean_sqrt_len", "all"]
HeadActivation = Literal["identity", "tanh", "relu", "gelu", "gelu_tanh", "silu", "sigmoid", "softmax"]
# What a model is used for, and the head it gets if it has none for that; vLLM's names.
Runner = Literal["auto", "generate", "pooling"]
Convert = Literal["auto", "none", "embed", "classify"]
# Whose code computes the layers; vLLM's values, and `vllm` by our name: what is read here or nothing.
ModelImpl = Literal["auto", "quire", "vllm", "transformers"]

DTYPE_SIZE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
KV_SCALE_BYTES = 4  # of a token's keys, and of its values, of one head in a cache of 8 bits; float32


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Rotary embedding. Scaling fields mean what transformers' `rope_parameters` means by them."""

    theta: float = 10000.0
    type: RopeType | Literal["none"] = "default"  # none: queries and keys are not rotated
    rotated_size: int | None = None  # numbers of a head that are rotated, its first ones; None: all
    turning_share: float = 1.0  # proportional: of all pairs the first ones turn, the rest never
    is_interleaved: bool = False  # the checkpoint's pairs are neighbours, not half of that size apart
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float | None = None  # yarn, longrope
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn
    # Queries are multiplied by 1 + this * log(1 + floor(position / original_max_position_embeddings)).
    query_scale_beta: float | None = None
    query_scale_offset: int = 0  # what is added to the position there
    # longrope: divisors of the frequencies, in an engine whose sequences end within the original length, and
    # in one whose sequences may be longer.
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


class LatentSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What latent attention computes beside a plain one (DeepSeek V2, arXiv 2405.04434, 2.1).

    Keys and values of all heads are projections of one latent, `rank` numbers a token, and of `rope_size`
    rotated ones: these are the cache. Queries go into the latent's space, and sums of latents out of it.
    """

    rank: int
    nope_size: int  # numbers of a query head that are not rotated, its first ones
    rope_size: int
    value_size: int
    norm_eps: float = 1e-6  # of the norms of latents
    q_rank: int | None = None  # queries are projections of a normed latent too, of so many numbers
    bias: bool = False  # of the projections to latents
    q: str = "self_attn.q_proj"
    q_a: str = "self_attn.q_a_proj"  # with a q_rank these take the place of `q`
    q_a_norm: str = "self_attn.q_a_layernorm"
    q_b: str = "self_attn.q_b_proj"
    kv_a: str = "self_attn.kv_a_proj_with_mqa"
    kv_a_norm: str = "self_attn.kv_a_layernorm"
    kv_b: str = "self_attn.kv_b_proj"
    # In the place of `kv_b` a file may have each head's [rank, nope_size] and [value_size, rank].
    split: tuple[str, str] = ("self_attn.k_b_proj.{}", "self_attn.v_b_proj.{}")

    @property
    def size(self) -> int:
        """Numbers of a token's latent."""
        return self.rank + self.rope_size

    @property
    def head_size(self) -> int:
        """Numbers of a query head before it is brought into the latent's space."""
        return self.nope_size + self.rope_size

    def count_key_numbers(self, kv_dtype: KVCacheDtype) -> int:
        """What a token has in the cache, in numbers of its type; in 8 bits two of each rotated number."""
        return self.size if kv_dtype == "auto" else self.size + self.rope_size

    def list_linears(self, num_heads: int, hidden_size: int) -> list[tuple[str, int, int]]:
        """Name, outputs and inputs of each of its projections."""
        size = num_heads * self.head_size
        queries = [(self.q, size, hidden_size)]
        if self.q_rank is not None:
            queries = [(self.q_a, self.q_rank, hidden_size), (self.q_b, size, self.q_rank)]
        key_values = num_heads * (self.nope_size + self.value_size)
        return [*queries, (self.kv_a, self.size, hidden_size), (self.kv_b, key_values, self.rank)]


class AttentionSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Self-attention of one layer over grouped heads. Names are of tensors, after the layer's prefix."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    # Tokens: a query sees itself and window - 1 before, and as many after it if not causal; None: all.
    window: int | None = None
    scale: float | None = None  # of scores; None: 1 / sqrt(head_size)
    soft_cap: float | None = None  # a score s becomes cap * tanh(s / cap)
    qkv_bias: bool = False
    o_bias: bool = False
    # Of queries and keys before rotation: of each head by itself, or of all heads of a token together.
    qk_norm: Literal["each_head", "all_heads"] | None = None
    qk_norm_has_weight: bool = True  # with "each_head": false where the norm multiplies by 1
    norms_rotated: bool = False  # with "each_head": after rotation
    # Each head of queries is followed by as many numbers, whose sigmoid multiplies what the head gives.
    has_gate: bool = False
    norms_values: bool = False  # each head's values are divided by their root mean square
    # The number of an earlier layer whose keys and values it reads, with heads like its own; it has none.
    kv_layer: int | None = None
    is_causal: bool = True  # False: a query sees the whole prompt; such a layer keeps no KV
    rope: RopeConfig | None = None  # of this layer; None: the model's
    # One name: that tensor holds queries, keys and values in this order, of all heads or, with
    # `qkv_by_group`, of each head of keys and values by itself.
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    qkv_by_group: bool = False
    out: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str | None = None  # of a number for each head: the score of a key more, whose value is 0
    # Then num_kv_heads is 1, head_size the numbers of a key (`size_latents`), and there are no `qkv`, norms
    # and sinks.
    latent: LatentSpec | None = None
    kv_group: int = 0  # of the model's `kv_windows`

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
        """Numbers of a token's queries, and of the layer's own keys and values."""
        return self.query_size + (2 * self.kv_size if self.kv_layer is None else 0)

    @property
    def projected_size(self) -> int:
        """Numbers of a token that are projected: those, and the gates of queries behind them."""
        return self.qkv_size + (self.query_size if self.has_gate else 0)

    @property
    def qkv_sizes(self) -> tuple[int, ...]:
        """Outputs of each projection in `qkv`."""
        if len(self.qkv) == 1:
            return (self.projected_size,)
        return (self.projected_size - 2 * self.kv_size, self.kv_size, self.kv_size)

    @property
    def keeps_kv(self) -> bool:
        """Whether keys and values of its own are kept."""
        return self.is_causal and self.kv_layer is None and self.num_heads > 0

    def count_cache_numbers(self, kv_dtype: KVCacheDtype) -> int:
        """What a token has in the cache, in numbers of its type: keys and values, or a latent, which is both;
        in 8 bits with their scales.
        """
        scales = 0 if kv_dtype == "auto" else self.num_kv_heads * KV_SCALE_BYTES
        if self.latent is not None:
            return self.latent.count_key_numbers(kv_dtype) + scales
        return 2 * (self.kv_size + scales)

    @property
    def rope_head_size(self) -> int:
        """Numbers of a head that rotation knows of."""
        return self.head_size if self.latent is None else self.latent.rope_size

    @property
    def out_size(self) -> int:
        """Numbers of a token that the last projection takes."""
        return self.query_size if self.latent is None else self.num_heads * self.latent.value_size

    def count_activations(self) -> int:
        """Numbers that one token holds between the layer's input and output."""
        if self.latent is None:
            return self.query_size + self.projected_size
        latent = self.latent
        each = latent.head_size + self.head_size + latent.rank + latent.value_size
        return self.num_heads * each + latent.size + (latent.q_rank or 0)

    def count_params(self, hidden_size: int) -> int:
        """Weights of the projections."""
        if self.latent is not None:
            linears = self.latent.list_linears(self.num_heads, hidden_size)
            return hidden_size * self.out_size + sum(num_out * num_in for _, num_out, num_in in linears)
        return hidden_size * (self.query_size + self.projected_size)

    def is_cut_by(self, size: int) -> bool:
        """Whether so many ranks can share it."""
        is_even = self.num_kv_heads % size == 0 or size % self.num_kv_heads == 0
        return self.num_heads % size == 0 and (is_even or self.qk_norm != "all_heads")

    def find_rank_heads(self, rank: int, size: int) -> list[int]:
        """The heads of keys and values that one of `size` ranks has for its heads of queries.

        Each is for equally many of those, one after the other: a head whose queries are in several ranks is
        in each of them, and where ranks begin within its queries it may be in one of them twice.
        """
        if self.num_heads == 0:
            return []
        num_heads, group = self.num_heads // size, self.num_heads // self.num_kv_heads
        each = math.gcd(num_heads, group)
        return [head // group for head in range(rank * num_heads, (rank + 1) * num_heads, each)]

    def for_rank(self, size: int) -> AttentionSpec:
        """What one of `size` ranks computes of it."""
        num_kv_heads = len(self.find_rank_heads(0, size))
        return replace(self, num_heads=self.num_heads // size, num_kv_heads=num_kv_heads)


# Of a layer without attention: no heads.
NO_ATTENTION = AttentionSpec(num_heads=0, num_kv_heads=0, head_size=0, rope=RopeConfig(type="none"), qkv=())


class DenseSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="dense"):
    """down(act(gate(x)) * up(x)). Names are those of the tensors, after the layer's prefix."""

    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    down_bias: bool | None = None  # where it is another than `bias`, which is then that of gate and up
    is_gated: bool = True  # False: down(act(up(x))), and `gate` names nothing
    fused: Literal["gate_up", "up_gate"] | None = None  # `gate` names a tensor of both in this order
    # In the activation's place xIELU, whose numbers alpha_p, alpha_n, beta and eps are tensors below this
    # name, or these.
    xielu: str | tuple[float, float, float, float] | None = None

    @property
    def has_down_bias(self) -> bool:
        """Whether the last projection adds a bias."""
        return self.bias if self.down_bias is None else self.down_bias

    def count_active_params(self, hidden_size: int) -> int:
        """Weights that one token is multiplied with."""
        return (3 if self.is_gated else 2) * hidden_size * self.intermediate_size

    def count_activations(self, hidden_size: int) -> int:  # noqa: ARG002
        """Numbers that one token holds between the layer's input and output."""
        return (3 if self.is_gated else 2) * self.intermediate_size

    def for_rank(self, size: int) -> DenseSpec:
        """What one of `size` ranks computes of it."""
        return replace(self, intermediate_size=self.intermediate_size // size)

    def is_cut_by(self, size: int) -> bool:
        """Whether so many ranks can share it."""
        return self.intermediate_size % size == 0


NO_FFN = DenseSpec(intermediate_size=0)  # of a layer that mixes tokens only


class ExpertStackSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How files may hold all experts of a layer: in tensors [experts, ...], named after the layer's prefix.

    The outputs of gate and up lie one after the other, or in turns. `NAME_bias` has their biases.
    """

    gate_up: str
    down: str
    is_interleaved: bool = False
    # [experts, in, out]; of plain weights only. None: as the shape says, else [experts, out, in].
    is_transposed: bool | None = False


class BranchNormsSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Norms of an ExpertsSpec whose parts each read the layer's sum, and are normed before they are added.

    The router reads that sum divided by its root mean square, and by the root of the hidden size, times the
    tensor `router_scale`. Names are after the layer's prefix.
    """

    experts: str = "pre_feedforward_layernorm_2"
    experts_out: str = "post_feedforward_layernorm_2"
    shared: str = "pre_feedforward_layernorm"
    shared_out: str = "post_feedforward_layernorm_1"
    router_scale: str = "router.scale"


class ExpertsSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="experts"):
    """Some of many feed-forward networks a token: those to which the router gives the largest scores.

    Their results are added by these scores, which are scaled to a sum of 1 if `norm_topk_prob`; the result of
    the shared network is added as it is, or weighed by the sigmoid of its gate. In the names of an expert's
    tensors {} is its number. kernels/linear/experts.py says how experts are chosen.
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False  # of all three projections
    norm_topk_prob: bool = True
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    router: str = "mlp.gate"
    router_bias: bool = False
    correction: str | None = None  # of a number for each expert, which its score has more for the choice only
    num_groups: int = 1
    num_groups_per_tok: int = 1
    group_score: Literal["max", "two"] = "two"
    # SparseMixer in the place of scores and groups: how near the largest logit others count for its weight.
    mixer_threshold: float | None = None
    routed_scaling_factor: float = 1.0
    expert_scales: str | None = None  # of a number for each expert, which multiplies its score at last
    branch_norms: BranchNormsSpec | None = None  # with `shared`; the layer has no ffn_norm then
    scales_inputs: bool = False  # scores multiply what an expert is given, not what it gives
    gate: str = "mlp.experts.{}.gate_proj"
    up: str = "mlp.experts.{}.up_proj"
    down: str = "mlp.experts.{}.down_proj"
    stack: ExpertStackSpec | None = None
    router_is_float32: bool = False  # its weight and its product, whatever the model's type
    shared: DenseSpec | None = None
    shared_gate: str | None = None  # a projection to one number

    def count_active_params(self, hidden_size: int) -> int:
        """Weights that one token is multiplied with."""
        shared = 0 if self.shared is None else self.shared.count_active_params(hidden_size)
        each = 3 * self.intermediate_size * self.num_experts_per_tok + self.num_experts
        return shared + hidden_size * (each + (self.shared_gate is not None))

    def count_activations(self, hidden_size: int) -> int:
        """Numbers that one token holds between the layer's input and output."""
        shared = 0 if self.shared is None else hidden_size + self.shared.count_activations(hidden_size)
        each = hidden_size + 3 * self.intermediate_size + 3
        return shared + self.num_experts + self.num_experts_per_tok * each

    def for_rank(self, size: int) -> ExpertsSpec:
        """What one of `size` ranks computes of it: each has all experts, cut along their width."""
        shared = None if self.shared is None else self.shared.for_rank(size)
        return replace(self, intermediate_size=self.intermediate_size // size, shared=shared)

    def is_cut_by(self, size: int) -> bool:
        """Whether so many ranks can share it."""
        return self.intermediate_size % size == 0 and (self.shared is None or self.shared.is_cut_by(size))


class LayerInputSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """h += norm(projection(act(gate(h)) * input)), after both parts, with the layer's input of each token.

    Names are after the layer's prefix; PerLayerInputsSpec says what the inputs are.
    """

    activation: Activation
    gate: str = "per_layer_input_gate"
    projection: str = "per_layer_projection"
    norm: str = "post_per_layer_input_norm"


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """h += out_norm(attention(norm(h))), then the same with the feed-forward part.

    With `is_parallel`: h += attention(norm(h)) + ffn(ffn_norm(h)); without a ffn_norm both read one norm.
    With `norms_sum`: h = norm(h + attention(h)), then the same with the feed-forward part; no out norms.
    The norms are named by their tensors, after the layer's prefix; without a name there is none.
    What is `recurrent` stands in attention's place. A layer may be one of its two parts only, with that
    part's norms.
    """

    attention: AttentionSpec = NO_ATTENTION
    recurrent: RecurrentSpec | None = None
    ffn: DenseSpec | ExpertsSpec = NO_FFN
    attention_norm: str | None = "input_layernorm"
    attention_out_norm: str | None = None
    ffn_norm: str | None = "post_attention_layernorm"
    ffn_out_norm: str | None = None
    norms_sum: bool = False
    is_parallel: bool = False  # without out norms
    residual_scale: float | None = None  # multiplies what each part adds; no out norms beside it
    layer_input: LayerInputSpec | None = None
    scalar: str | None = None  # of one number, which multiplies the sum after the layer

    def is_cut_by(self, size: int) -> bool:
        """Whether so many ranks can share it."""
        is_cut = self.recurrent is None or self.recurrent.is_cut_by(size)
        return is_cut and self.attention.is_cut_by(size) and self.ffn.is_cut_by(size)

    def for_rank(self, size: int) -> LayerSpec:
        """What one of `size` ranks computes of it."""
        return replace(
            self,
            attention=self.attention.for_rank(size),
            recurrent=self.recurrent and self.recurrent.for_rank(size),
            ffn=self.ffn.for_rank(size),
        )

    @property
    def num_shares(self) -> int:
        """An upper bound of the ranks that can share it."""
        shares = [self.attention.num_heads, self.recurrent.num_shares if self.recurrent else 0]
        return min((share for share in shares if share), default=self.ffn.intermediate_size)

    @property
    def has_mixer(self) -> bool:
        """Whether it has attention, or something recurrent."""
        return self.recurrent is not None or self.attention.num_heads > 0

    def count_active_params(self, hidden_size: int) -> int:
        """Weights that one token is multiplied with."""
        recurrent = [] if self.recurrent is None else self.recurrent.list_linears(hidden_size)
        return (
            self.attention.count_params(hidden_size)
            + sum(num_out * num_in for _, num_out, num_in in recurrent)
            + self.ffn.count_active_params(hidden_size)
        )

    def count_activations(self, hidden_size: int) -> int:
        """Numbers that one token holds in the layer's parts."""
        recurrent = 0 if self.recurrent is None else self.recurrent.count_activations()
        return self.attention.count_activations() + recurrent + self.ffn.count_activations(hidden_size)


class EmbeddingSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """norm(tokens[id] + positions[position + offset] + types[type]), named by whole tensor names."""

    tokens: str = "model.embed_tokens"
    positions: str | None = None  # a table of max_position_embeddings + position_offset rows
    position_offset: int = 0
    types: str | None = None
    num_types: int = 0  # rows of that table
    norm: str | None = None


class PerLayerInputsSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An input of `size` numbers for each layer and token, by whole tensor names.

    (norm(projection(embedding) / sqrt(hidden size)) + tokens[id] * sqrt(size)) / sqrt(2), where `tokens` and
    `projection` have all layers' numbers one after the other.
    """

    size: int
    num_rows: int  # of the table, from vocab_size on
    tokens: str = "model.embed_tokens_per_layer"
    projection: str = "model.per_layer_model_projection"
    norm: str = "model.per_layer_projection_norm"


class RelativeBiasSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What each head adds to a score by the distance of key and query, the same in all layers.

    `name` is a table [num_buckets, heads]; the buckets are T5's bidirectional ones (arXiv 1910.10683, 2.1).
    """

    name: str
    num_buckets: int = 32
    max_distance: int = 128


class ProjectionSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """norm(act(weight @ x + bias)) of a pooled vector, in float32; by the name of its tensors."""

    name: str  # of `name`.weight [out_size, in_size] and `name`.bias [out_size]
    in_size: int
    out_size: int
    bias: bool = True
    activation: HeadActivation = "identity"
    norm: str | None = None  # a LayerNorm with the model's epsilon and kind of bias
    file: str | None = None  # safetensors within the model's folder; None: the model's own files
    # (yes, no): the tensor is [vocab_size, in_size], and weight[yes] - weight[no] the only row.
    token_rows: tuple[int, int] | None = None


class PoolingSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """From the hidden states of a prompt to one vector: pools side by side, then projections one by one.

    A vector of `num_labels` scores where that is above 0 (activation last), else an embedding (cut to the
    asked dimensions, then normalized). Token-wise tasks project each token's hidden state.
    """

    pools: tuple[Pool, ...] = ("cls",)  # ("all",): token-wise only
    projections: tuple[ProjectionSpec, ...] = ()
    normalize: bool = False
    is_matryoshka: bool = False
    matryoshka_dimensions: tuple[int, ...] = ()  # with is_matryoshka: the only ones; (): any up to the width
    num_labels: int = 0
    activation: HeadActivation = "identity"

    @property
    def tasks(self) -> tuple[PoolingTask, ...]:
        """What the head answers with."""
        whole, each = ("classify", "token_classify") if self.num_labels else ("embed", "token_embed")
        if self.pools == ("all",):
            return (each,)
        return (whole, each) if len(self.pools) == 1 else (whole,)  # a token is as wide as one pool

    def count_width(self, hidden_size: int) -> int:
        """Numbers of a vector."""
        return self.projections[-1].out_size if self.projections else hidden_size * len(self.pools)


class StageSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which part of a model a pipeline's stage is: some layers, one after the other.

    The first stage has the embedding, the last one the last norm and what follows it. Hidden states pass from
    each to the next.
    """

    first_layer: int = 0  # the number of the first of its layers in the whole model
    is_first: bool = True
    is_last: bool = True


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Embedding, layers, last norm; then a projection to logits, pooling, or both."""

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
    logit_scale: float | None = None  # multiplies the logits, before the cap
    logit_soft_cap: float | None = None
    tie_word_embeddings: bool = False
    norm_kind: NormKind = "rms"  # layer: (x - mean) / sqrt(variance + norm_eps) * weight + bias
    norm_bias: bool = False
    norm_has_weight: bool = True  # false, with norm_kind "layer": it is 1, and no tensor
    embedding: EmbeddingSpec = EmbeddingSpec()
    relative_bias: RelativeBiasSpec | None = None
    per_layer_inputs: PerLayerInputsSpec | None = None
    layer_prefix: str = "model.layers.{}"  # {} is the layer's number
    norm: str | None = "model.norm"  # after the last layer
    optional_prefix: str = "model."  # of tensor names; a checkpoint may leave it out of all of them
    # Beginnings of the names in the checkpoint, and what they are here.
    stored_prefixes: tuple[tuple[str, str], ...] = ()
    unused_tensors: tuple[str, ...] = ()  # beginnings of names that a checkpoint may hold and nobody reads
    # What each KV group keeps of a request: None: everything, else what a window of so many tokens sees next.
    kv_windows: tuple[int | None, ...] = (None,)
    has_logits: bool = True
    lm_head_bias: bool = False
    transposed_linears: bool = False  # of layers: the checkpoint stores [in, out]
    pooling: PoolingSpec | None = None
    stage: StageSpec = StageSpec()
    # Of a model that chooses so many keys for each query: with no more of them it has to choose none.
    most_keys: int | None = None
    generic: GenericSpec | None = None  # what transformers' code computes; of `layers` attention is meant
    weight_formats: WeightFormats = (
        WeightFormats()
    )  # of linear layers that are narrower than the model's type

    @property
    def is_causal(self) -> bool:
        """Whether a prompt can be computed in chunks and has KV; else all of it is computed in one step."""
        return all(layer.attention.is_causal for layer in self.layers)

    @property
    def has_latents(self) -> bool:
        """Whether the cache of some layer is of latents."""
        return any(layer.attention.latent is not None for layer in self.layers)

    @property
    def num_layers(self) -> int:
        """How many layers there are."""
        return len(self.layers)

    @property
    def max_stages(self) -> int:
        """In how many pipeline stages it can be cut: none reads what another one has beside hidden states."""
        is_one = self.per_layer_inputs is not None or any(
            layer.attention.kv_layer is not None for layer in self.layers
        )
        return 1 if is_one or self.generic is not None else self.num_layers

    @property
    def layer_inputs_size(self) -> int:
        """Numbers of a token's inputs for all layers."""
        return 0 if self.per_layer_inputs is None else self.num_layers * self.per_layer_inputs.size

    @property
    def tasks(self) -> tuple[str, ...]:
        """What it does: "generate", its tasks of PoolingParams, "score" of two texts by one of those."""
        tasks: tuple[str, ...] = ("generate",) if self.has_logits else ()
        if self.pooling is None:
            return tasks
        pooled = self.pooling.tasks
        has_scores = "embed" in pooled or ("classify" in pooled and self.pooling.num_labels == 1)
        return tasks + pooled + (("score",) if has_scores else ())

    def kv_bytes_per_token(self, dtype: Dtype, kv_dtype: KVCacheDtype = "auto") -> int:
        """Bytes of KV cache that one token takes over all layers; the model's `dtype` counts for "auto"."""
        keeping = [layer.attention for layer in self.layers if layer.attention.keeps_kv]
        itemsize = DTYPE_SIZE_BYTES[dtype] if kv_dtype == "auto" else 1
        return sum(attention.count_cache_numbers(kv_dtype) for attention in keeping) * itemsize

    @property
    def state_offsets(self) -> list[int]:
        """Where each layer's recurrent state begins among the numbers of a slot; the last entry is their
        end. States begin at multiples of 64 bytes.
        """
        sizes = [layer.recurrent.state_size if layer.recurrent else 0 for layer in self.layers]
        return list(accumulate(map(round_up, sizes), initial=0))

    @property
    def state_size(self) -> int:
        """float32 numbers of a slot: the recurrent states of one request in all layers."""
        return self.state_offsets[-1]

    @property
    def num_active_params(self) -> int:
        """Weights that a token's pass uses: all but those of other tokens' experts, norms and biases."""
        if self.generic is not None:
            return self.generic.num_active_params
        hidden, inputs = self.hidden_size, self.per_layer_inputs
        num_tables = (1 if self.tie_word_embeddings else 2) if self.has_logits else 0
        of_inputs = 0 if inputs is None else (3 * hidden + 1) * self.layer_inputs_size
        return (
            num_tables * self.vocab_size * hidden
            + of_inputs
            + sum(layer.count_active_params(hidden) for layer in self.layers)
        )

    @property
    def num_activations_per_token(self) -> int:
        """Upper estimate of the numbers that a token holds at once on its way through a layer."""
        if self.generic is not None:
            return self.generic.num_activations
        # Residual, normed, attention's output and a copy; beside what each part holds.
        return (
            4 * self.hidden_size
            + 2 * self.layer_inputs_size
            + max(layer.count_activations(self.hidden_size) for layer in self.layers)
        )

    def find_tensor_parallel_sizes(self) -> list[int]:
        """How many ranks can share the model, rising from 1."""
        if self.generic is not None:
            return [1]
        most = min(self.vocab_size, *(layer.num_shares for layer in self.layers))
        return [size for size in range(1, most + 1) if all(layer.is_cut_by(size) for layer in self.layers)]

    def for_rank(self, size: int) -> ModelSpec:
        """What each of `size` ranks computes between embedding and logits; the vocabulary is as it was.

        `size` is one of `find_tensor_parallel_sizes`. The ranks differ in what they read of the weights only.
        """
        return replace(self, layers=tuple(layer.for_rank(size) for layer in self.layers))

    def for_stage(self, stage: int, num_stages: int) -> ModelSpec:
        """What one of at most `num_layers` stages computes of it, tensor parallel ranks together.

        Names of tensors that are in files and that other stages read are among `unused_tensors`. KV blocks of
        all stages are alike in number, so a stage's KV grows with its layers only.
        """
        first, end = find_stages(self, num_stages)[stage]
        is_first, is_last = stage == 0, stage == num_stages - 1
        others = [index for index in range(self.num_layers) if not first <= index < end]
        unused = [f"{self.layer_prefix.format(index)}." for index in others]
        if not is_first:
            names = self.embedding
            unused += [
                f"{name}." for name in (names.tokens, names.positions, names.types, names.norm) if name
            ]
        if not is_last:
            projections = () if self.pooling is None else self.pooling.projections
            names = [self.norm, "lm_head", *(projection.name for projection in projections)]
            unused += [f"{name}." for name in names if name]
        unused += [name.removeprefix(self.optional_prefix) for name in unused]
        return replace(
            self,
            layers=self.layers[first:end],
            unused_tensors=(*self.unused_tensors, *dict.fromkeys(unused)),
            has_logits=self.has_logits and is_last,
            pooling=self.pooling if is_last else None,
            stage=StageSpec(first_layer=first, is_first=is_first, is_last=is_last),
        )


def rename_stored(name: str, prefixes: tuple[tuple[str, str], ...]) -> str:
    """What a tensor or layer of a checkpoint with these `stored_prefixes` is called here."""
    stored, ours = next((each for each in prefixes if name.startswith(each[0])), ("", ""))
    return ours + name.removeprefix(stored)


def list_stored_names(name: str, optional_prefix: str) -> Iterator[str]:
    """What files may call a tensor: old exports have others for BERT's norms, GPT-NeoX's head."""
    yield name
    yield (short := name.removeprefix(optional_prefix))
    for each in (name, short):
        yield each.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
    yield name.replace("lm_head.", "embed_out.")


def find_stages(spec: ModelSpec, num_stages: int) -> list[tuple[int, int]]:
    """The layers [first, end) of each stage, so that the longest stage takes as short as it can.

    A layer costs what a token is multiplied with, and the last stage has the logits too; of equal cuts the
    earlier stages have more layers.
    """
    hidden = spec.hidden_size
    costs = [layer.count_active_params(hidden) for layer in spec.layers]
    costs[-1] += spec.vocab_size * hidden if spec.has_logits else 0
    sums = [0, *accumulate(costs)]

    def cut(most: int) -> list[tuple[int, int]] | None:
        """Stages that cost at most so much, as many layers in each as fit; None: there is no way."""
        stages: list[tuple[int, int]] = []
        first = 0
        for left in reversed(range(num_stages)):  # stages that come after this one
            end = min(bisect_right(sums, sums[first] + most) - 1, spec.num_layers - left)
            if end <= first:
                return None
            stages.append((first, end))
            first = end
        return stages if first == spec.num_layers else None

    bounds = sorted({end - start for start in sums for end in sums if end > start})
    least = bisect_left(bounds, True, key=lambda most: cut(most) is not None)
    stages = cut(bounds[least])
    assert stages is not None
    return stages


def find_ropes(spec: ModelSpec) -> list[tuple[RopeConfig, int]]:
    """The different rotations of a model's layers with their head size, in the order in which they come."""
    ropes = [(layer.attention.rope or spec.rope, layer.attention.rope_head_size) for layer in spec.layers]
    return list(dict.fromkeys(rope for rope in ropes if rope[0].type != "none"))


def has_dynamic_rope(spec: ModelSpec) -> bool:
    """Whether the angles of some layer depend on the length of a token's sequence."""
    return any(rope.type == "dynamic" for rope, _ in find_ropes(spec))


def size_latents(spec: ModelSpec, kv_dtype: KVCacheDtype) -> ModelSpec:
    """The spec with heads as large as keys are in such a cache, where these are of latents."""
    if not spec.has_latents:
        return spec
    layers = list(spec.layers)
    for index, layer in enumerate(layers):
        attention = layer.attention
        if attention.latent is not None:
            size = attention.latent.count_key_numbers(kv_dtype)
            layers[index] = replace(layer, attention=replace(attention, head_size=size))
    sized = replace(spec, layers=tuple(layers))
    return spec if sized == spec else sized
