"""DistilBERT: BERT of half the layers, without types of tokens, under names of its own (arXiv 1910.01108)."""

from __future__ import annotations

from msgspec.structs import replace

from ....ipc.model_spec import DenseSpec, EmbeddingSpec, LayerSpec, ModelSpec
from ..config_fields import ConfigFields
from ..parts import MAX_LAYERS
from .parts import check_encoder, read_encoder, read_encoder_activation, read_heads

_UNUSED = ("vocab_transform.", "vocab_layer_norm.", "vocab_projector.", "embeddings.position_ids")


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The encoder of config.json."""
    check_encoder(fields)
    fields.ignore("sinusoidal_pos_embds")  # how the stored table of positions began
    layer = LayerSpec(
        attention=replace(
            read_heads(fields, "n_heads", "dim"),
            qkv_bias=True,
            o_bias=True,
            qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
            out="attention.out_lin",
        ),
        ffn=DenseSpec(
            intermediate_size=fields.integer("hidden_dim"),
            activation=read_encoder_activation(fields, "activation"),
            bias=True,
            is_gated=False,
            up="ffn.lin1",
            down="ffn.lin2",
        ),
        attention_norm="sa_layer_norm",
        ffn_norm="output_layer_norm",
        norms_sum=True,
    )
    embeddings = "distilbert.embeddings."
    return read_encoder(
        fields,
        "distilbert.",
        [layer] * fields.integer("n_layers", high=MAX_LAYERS),
        hidden_size=fields.integer("dim"),
        max_positions=fields.integer("max_position_embeddings", 512),
        embedding=EmbeddingSpec(
            tokens=f"{embeddings}word_embeddings",
            positions=f"{embeddings}position_embeddings",
            norm=f"{embeddings}LayerNorm",
        ),
        layer_prefix="distilbert.transformer.layer.{}",
        unused=_UNUSED,
        norm_eps=1e-12,
    )
