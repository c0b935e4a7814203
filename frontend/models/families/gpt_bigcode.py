"""GPT-BigCode, the first StarCoder: GPT-2 with one head of keys and values, stored by output."""

from __future__ import annotations

from msgspec.structs import replace

from ....ipc.spec.model_spec import ModelSpec
from .config_fields import ConfigFields
from .gpt2 import read_gpt2


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    is_single = fields.boolean("multi_query", True)
    fields.ignore("num_key_value_heads")  # transformers writes it and does not read it
    fields.ignore("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")  # scores are float32
    spec = read_gpt2(fields, "GPTBigCodeForCausalLM", activation="gelu_pytorch_tanh")
    layer = spec.layers[0]
    num_heads = layer.attention.num_heads
    attention = replace(
        layer.attention, num_kv_heads=1 if is_single else num_heads, qkv_by_group=not is_single
    )
    layers = (replace(layer, attention=attention),) * spec.num_layers
    return replace(spec, layers=layers, transposed_linears=False)
