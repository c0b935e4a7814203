"""BERT, and RoBERTa, XLM-R and CamemBERT, which count positions from behind the padding token's.

Norms of sums, learned positions, two types of tokens (arXiv 1810.04805; 1907.11692).
"""

from __future__ import annotations

from msgspec.structs import replace

from ....ipc.model_spec import DenseSpec, EmbeddingSpec, LayerSpec, ModelSpec
from ..config_fields import ConfigFields
from ..parts import read_num_layers
from .parts import check_encoder, read_encoder, read_encoder_activation, read_heads

_UNUSED = ("pooler.", "cls.", "lm_head.", "embeddings.position_ids", "embeddings.token_type_ids")


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The encoder of config.json."""
    return _read(fields, "bert.", position_offset=0)


def read_roberta_spec(fields: ConfigFields) -> ModelSpec:
    """The encoder of config.json."""
    offset = fields.integer("pad_token_id", 1, low=0) + 1
    return _read(fields, "roberta.", offset)


def read_layer(fields: ConfigFields, qkv: tuple[str, str, str], out: str, norm: str) -> LayerSpec:
    """A layer of BERT, and of MPNet, whose attention and its norm have other names."""
    return LayerSpec(
        attention=replace(read_heads(fields), qkv_bias=True, o_bias=True, qkv=qkv, out=out),
        ffn=DenseSpec(
            intermediate_size=fields.integer("intermediate_size"),
            activation=read_encoder_activation(fields),
            bias=True,
            is_gated=False,
            up="intermediate.dense",
            down="output.dense",
        ),
        attention_norm=norm,
        ffn_norm="output.LayerNorm",
        norms_sum=True,
    )


def read_max_positions(fields: ConfigFields, offset: int) -> int:
    """How many positions there are, of which the first is the row `offset` of the table."""
    rows = fields.integer("max_position_embeddings", 512)
    if rows <= offset:
        raise fields.error("max_position_embeddings", rows, f"above {offset}, the first position")
    return rows - offset


def _read(fields: ConfigFields, prefix: str, position_offset: int) -> ModelSpec:
    check_encoder(fields)
    embeddings = f"{prefix}embeddings."
    max_positions = read_max_positions(fields, position_offset)
    layer = read_layer(
        fields,
        ("attention.self.query", "attention.self.key", "attention.self.value"),
        "attention.output.dense",
        "attention.output.LayerNorm",
    )
    return read_encoder(
        fields,
        prefix,
        [layer] * read_num_layers(fields),
        hidden_size=fields.integer("hidden_size"),
        max_positions=max_positions,
        embedding=EmbeddingSpec(
            tokens=f"{embeddings}word_embeddings",
            positions=f"{embeddings}position_embeddings",
            position_offset=position_offset,
            types=f"{embeddings}token_type_embeddings",
            num_types=fields.integer("type_vocab_size", 2),
            norm=f"{embeddings}LayerNorm",
        ),
        layer_prefix=f"{prefix}encoder.layer.{{}}",
        unused=_UNUSED,
        norm_eps=fields.number("layer_norm_eps", 1e-12),
    )
