"""DistilBERT: BERT of half the layers, without types of tokens, under names of its own (arXiv 1910.01108)."""

from __future__ import annotations

from .....ipc.spec.model_spec import ModelSpec
from ..config_fields import ConfigFields
from ..parts import MAX_LAYERS
from .parts import check_encoder, name_embeddings, read_encoder, read_plain_layer

_UNUSED = ("vocab_transform.", "vocab_layer_norm.", "vocab_projector.", "embeddings.position_ids")


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The encoder of config.json."""
    check_encoder(fields)
    fields.ignore("sinusoidal_pos_embds")  # how the stored table of positions began
    layer = read_plain_layer(
        fields,
        qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        out="attention.out_lin",
        norm="sa_layer_norm",
        ffn=("ffn.lin1", "ffn.lin2", "output_layer_norm"),
        keys=("n_heads", "dim", "hidden_dim", "activation"),
    )
    return read_encoder(
        fields,
        "distilbert.",
        [layer] * fields.integer("n_layers", high=MAX_LAYERS),
        max_positions=fields.integer("max_position_embeddings", 512),
        embedding=name_embeddings("distilbert."),
        layer_prefix="distilbert.transformer.layer.{}",
        unused=_UNUSED,
        norm_eps=1e-12,
    )
