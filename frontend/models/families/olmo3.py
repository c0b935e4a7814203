"""OLMo 3: OLMo 2 with a window on three layers of four, where the scaling of rope does not count."""

from __future__ import annotations

from msgspec.structs import replace

from ....ipc.spec.model_spec import ModelSpec
from .config_fields import ConfigFields
from .olmo2 import read_layer, read_olmo
from .parts import read_layer_types, read_num_layers, read_window
from .rope import read_ropes_by_kind


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    num_layers, window = read_num_layers(fields), read_window(fields, 4096)
    is_sliding = read_layer_types(fields, [(layer + 1) % 4 != 0 for layer in range(num_layers)])
    max_positions = fields.integer("max_position_embeddings", 2048)
    rope, sliding_rope = read_ropes_by_kind(fields, max_positions, 5e5, 5e5)
    layer = read_layer(fields)
    attention = replace(layer.attention, window=window, rope=None if sliding_rope == rope else sliding_rope)
    layers = [replace(layer, attention=attention) if slides else layer for slides in is_sliding]
    return read_olmo(fields, "Olmo3ForCausalLM", layers, rope=rope)
