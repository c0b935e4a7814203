"""Gemma 3, the text model: Gemma 2 with norms of query and key heads in the place of soft caps.

Five layers have a window for one without, and each kind its own rotation (arXiv 2503.19786, section 2).
"""

from __future__ import annotations

from msgspec.structs import replace

from ....ipc.spec.model_spec import ModelSpec
from .config_fields import ConfigFields
from .gemma2 import read_four_norms, read_scaled_attention
from .parts import read_layer_types, read_num_layers, read_window
from .rope import read_ropes_by_kind

_PATTERN = 6
_MAX_POSITIONS = 131_072


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    if fields.boolean("use_bidirectional_attention", False):
        raise fields.error("use_bidirectional_attention", True, "false, as models that generate have it")
    return read_text_spec(fields)


def read_text_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json. EmbeddingGemma sees the whole prompt, half of its window to each side."""
    is_causal = not fields.boolean("use_bidirectional_attention", False)
    num_layers, window = read_num_layers(fields), read_window(fields, 4096)
    if window is not None and not is_causal:
        window = window // 2 + 1
    pattern = fields.integer("_sliding_window_pattern", fields.integer("sliding_window_pattern", _PATTERN))
    is_sliding = read_layer_types(fields, [(layer + 1) % pattern != 0 for layer in range(num_layers)])
    max_positions = fields.integer("max_position_embeddings", _MAX_POSITIONS)
    rope, sliding_rope = read_ropes_by_kind(fields, max_positions, 1e6, 1e4)
    fields.only("attn_logit_softcapping", None)  # which transformers does not compute here
    heads = read_scaled_attention(fields, soft_cap=None)
    attention = replace(heads, qk_norm="each_head", is_causal=is_causal)
    sliding = replace(attention, window=window, rope=None if sliding_rope == rope else sliding_rope)
    each = [sliding if slides else attention for slides in is_sliding]
    return read_four_norms(fields, "Gemma3ForCausalLM", each, _MAX_POSITIONS, soft_cap=None, rope=rope)
