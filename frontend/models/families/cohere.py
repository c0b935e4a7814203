"""Command: both parts of a layer read one LayerNorm without bias, neighbours are rotated, logits scaled.

Of the second generation layers without a window rotate nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from ....ipc.spec.model_spec import AttentionSpec, LayerSpec, ModelSpec, RopeConfig
from .config_fields import ConfigFields
from .parts import read_attention, read_dense, read_layer_types, read_model, read_num_layers, read_window
from .rope import read_rope

# Settings of the maker's code with the value of what is computed.
_ONLY: dict[str, Any] = {
    "use_qk_norm": False,
    "position_embedding_type": "rope_gptj",
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "order_of_interleaved_layers": "local_attn_first",
}


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    attention = read_attention(fields, may_have_bias=True)
    return _read(fields, "CohereForCausalLM", [attention] * read_num_layers(fields), rope_theta=5e5)


def read_spec_2(fields: ConfigFields) -> ModelSpec:
    """The model of config.json of the class Cohere2."""
    num_layers, window = read_num_layers(fields), read_window(fields, 4096)
    pattern = fields.integer("sliding_window_pattern", 4)
    fields.ignore("layer_switch")  # another name of the pattern
    is_sliding = read_layer_types(fields, [(layer + 1) % pattern != 0 for layer in range(num_layers)])
    heads = read_attention(fields, may_have_bias=True)
    full = replace(heads, rope=RopeConfig(type="none"))
    sliding = full if window is None else replace(heads, window=window)
    attention = [sliding if slides else full for slides in is_sliding]
    return _read(fields, "Cohere2ForCausalLM", attention, rope_theta=1e4)


def _read(
    fields: ConfigFields, architecture: str, attention: Sequence[AttentionSpec], rope_theta: float
) -> ModelSpec:
    fields.rename(rms_norm_eps="layer_norm_eps")
    for key, only in _ONLY.items():
        fields.only(key, only)
    fields.ignore("use_parallel_embedding")
    max_positions, ffn = fields.integer("max_position_embeddings", 8192), read_dense(fields)
    return read_model(
        fields,
        architecture,
        [LayerSpec(attention=part, ffn=ffn, ffn_norm=None, is_parallel=True) for part in attention],
        max_positions,
        norm_eps=1e-5,
        rope=replace(read_rope(fields, max_positions, rope_theta), is_interleaved=True),
        tie_word_embeddings=True,
        norm_kind="layer",
        logit_scale=fields.number("logit_scale", 0.0625),
    )
