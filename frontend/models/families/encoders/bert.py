"""BERT, and RoBERTa, XLM-R and CamemBERT, which count positions from behind the padding token's.

Norms of sums, learned positions, two types of tokens (arXiv 1810.04805; 1907.11692).
"""

from __future__ import annotations

from .....ipc.spec.model_spec import ModelSpec
from ..config_fields import ConfigFields
from ..parts import read_num_layers
from .parts import check_encoder, name_embeddings, read_encoder, read_plain_layer

_UNUSED = ("pooler.", "cls.", "lm_head.", "embeddings.position_ids", "embeddings.token_type_ids")


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The encoder of config.json."""
    return _read(fields, "bert.", position_offset=0)


def read_roberta_spec(fields: ConfigFields) -> ModelSpec:
    """The encoder of config.json."""
    offset = fields.integer("pad_token_id", 1, low=0) + 1
    return _read(fields, "roberta.", offset)


def read_max_positions(fields: ConfigFields, offset: int) -> int:
    """How many positions there are, of which the first is the row `offset` of the table."""
    rows = fields.integer("max_position_embeddings", 512)
    if rows <= offset:
        raise fields.error("max_position_embeddings", rows, f"above {offset}, the first position")
    return rows - offset


def _read(fields: ConfigFields, prefix: str, position_offset: int) -> ModelSpec:
    check_encoder(fields)
    max_positions = read_max_positions(fields, position_offset)
    layer = read_plain_layer(
        fields,
        qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
        out="attention.output.dense",
        norm="attention.output.LayerNorm",
    )
    return read_encoder(
        fields,
        prefix,
        [layer] * read_num_layers(fields),
        max_positions=max_positions,
        embedding=name_embeddings(prefix, position_offset, fields.integer("type_vocab_size", 2)),
        layer_prefix=f"{prefix}encoder.layer.{{}}",
        unused=_UNUSED,
        norm_eps=fields.number("layer_norm_eps", 1e-12),
    )
