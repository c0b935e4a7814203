"""MPNet: BERT whose heads add a learned number by the distance of two tokens (arXiv 2004.09297)."""

from __future__ import annotations

from .....ipc.spec.model_spec import ModelSpec, RelativeBiasSpec
from ..config_fields import ConfigFields
from ..parts import read_num_layers
from .bert import read_max_positions
from .parts import check_encoder, name_embeddings, read_encoder, read_plain_layer

_POSITION_OFFSET = 2  # transformers takes 1 as the padding token, whatever config.json says
_NUM_BUCKETS = 32  # likewise
_UNUSED = ("pooler.", "lm_head.", "embeddings.position_ids")


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The encoder of config.json."""
    check_encoder(fields)
    fields.only("relative_attention_num_buckets", _NUM_BUCKETS)
    max_positions = read_max_positions(fields, _POSITION_OFFSET)
    layer = read_plain_layer(
        fields,
        qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
        out="attention.attn.o",
        norm="attention.LayerNorm",
    )
    return read_encoder(
        fields,
        "mpnet.",
        [layer] * read_num_layers(fields),
        max_positions=max_positions,
        embedding=name_embeddings("mpnet.", _POSITION_OFFSET),
        relative_bias=RelativeBiasSpec(
            name="mpnet.encoder.relative_attention_bias", num_buckets=_NUM_BUCKETS
        ),
        layer_prefix="mpnet.encoder.layer.{}",
        unused=_UNUSED,
        norm_eps=fields.number("layer_norm_eps", 1e-12),
    )
