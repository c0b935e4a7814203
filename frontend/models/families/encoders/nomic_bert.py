"""Nomic BERT: BERT with rotary positions and SwiGLU, without biases (arXiv 2402.01613).

config.json has GPT-2's names in the maker's checkpoints and BERT's in those that transformers writes.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec.structs import replace

from .....ipc.spec.model_spec import (
    Activation,
    AttentionSpec,
    DenseSpec,
    LayerSpec,
    ModelSpec,
    RopeConfig,
)
from ..config_fields import ConfigFields
from ..parts import MAX_LAYERS, read_num_layers
from .parts import (
    name_embeddings,
    read_encoder,
    read_encoder_activation,
    read_heads,
    read_static_rope,
    with_pooler,
)

_PREFIX = "nomic_bert."  # of transformers' classifiers
_THETA = 1000.0
_GATED: dict[str, Activation] = {"swiglu": "silu", "geglu": "gelu"}
# Settings of the maker's code with the value of what is computed here.
_ONLY = {
    "causal": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "num_experts": 0,
    "parallel_block": False,
    "parallel_block_tied_norm": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "scale_attn_weights": True,
    "use_rms_norm": False,
    "add_cross_attention": False,
    "is_decoder": False,
}
_UNUSED = ("pooler.", "cls.", "embeddings.position_ids", "embeddings.token_type_ids")


class _Sizes(NamedTuple):
    heads: AttentionSpec
    ffn: DenseSpec
    num_layers: int
    max_positions: int
    norm_eps: float
    rope: RopeConfig


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The encoder of config.json."""
    is_original = "n_embd" in fields
    if is_original:
        for key, only in _ONLY.items():
            fields.only(key, only)
        if (fraction := fields.get("rotary_emb_fraction", 0.0)) != 1.0:  # absent, its maker rotates nothing
            raise fields.error("rotary_emb_fraction", fraction, "1.0")
    sizes = _read_original(fields) if is_original else _read_ported(fields)
    layer = LayerSpec(
        attention=replace(sizes.heads, qkv=("attn.Wqkv",), out="attn.out_proj"),
        ffn=replace(sizes.ffn, gate="mlp.fc12", up="mlp.fc11", down="mlp.fc2"),
        attention_norm="norm1",
        ffn_norm="norm2",
        norms_sum=True,
    )
    num_types = fields.integer("type_vocab_size", 2, low=0)
    spec = read_encoder(
        fields,
        _PREFIX,
        [layer] * sizes.num_layers,
        max_positions=sizes.max_positions,
        embedding=replace(
            name_embeddings(_PREFIX, num_types=num_types), positions=None, norm=f"{_PREFIX}emb_ln"
        ),
        layer_prefix=f"{_PREFIX}encoder.layers.{{}}",
        unused=_UNUSED,
        norm_eps=sizes.norm_eps,
        rope=sizes.rope,
    )
    multiple = fields.integer("pad_vocab_size_multiple", 1) if is_original else 1
    return replace(spec, vocab_size=-(-spec.vocab_size // multiple) * multiple)


def read_classifier(fields: ConfigFields) -> ModelSpec:
    """The encoder with a classifier on its pooler, as transformers' class has it."""
    if "n_embd" in fields:
        raise fields.error("n_embd", fields.get("n_embd"), "absent: a classifier of transformers' own class")
    return with_pooler(read_spec)(fields)


def _read_original(fields: ConfigFields) -> _Sizes:
    name = fields.get("activation_function", "gelu_new")  # GPT-2's default, as that of the epsilon
    if name not in _GATED:
        raise fields.error("activation_function", name, f"one of {', '.join(_GATED)}")
    hidden_size = fields.integer("n_embd")
    width = fields.integer("n_inner", 8 * hidden_size // 3)
    ffn = DenseSpec(intermediate_size=-(-width // 256) * 256, activation=_GATED[name])  # as its code rounds
    fields.ignore("n_positions", "layer_norm_eps", "fused_bias_fc", "dense_seq_output")  # speed, training
    return _Sizes(
        read_heads(fields, "n_head", "n_embd"),
        ffn,
        fields.integer("n_layer", high=MAX_LAYERS),
        # Beyond these the maker scales the rotation, which rotary_scaling_factor would say.
        fields.integer("max_trained_positions", 2048),
        fields.number("layer_norm_epsilon", 1e-5),
        RopeConfig(theta=fields.number("rotary_emb_base", 10_000.0, low=1.0)),
    )


def _read_ported(fields: ConfigFields) -> _Sizes:
    max_positions = fields.integer("max_position_embeddings", 2048)
    rope = read_static_rope(fields, max_positions, _THETA)
    ffn = DenseSpec(
        intermediate_size=fields.integer("intermediate_size"),
        activation=read_encoder_activation(fields, default="silu"),
    )
    norm_eps = fields.number("layer_norm_eps", 1e-12)
    return _Sizes(read_heads(fields), ffn, read_num_layers(fields), max_positions, norm_eps, rope)
