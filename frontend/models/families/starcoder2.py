"""StarCoder2: Mistral with LayerNorms, biases, and a feed-forward part without a gate."""

from __future__ import annotations

from msgspec.structs import replace

from ....ipc.spec.model_spec import LayerSpec, ModelSpec
from .config_fields import ConfigFields
from .parts import read_attention, read_model, read_num_layers, read_plain, read_window


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    fields.rename(rms_norm_eps="norm_epsilon")
    fields.only("norm_type", "layer_norm")  # these two of its maker's own code
    fields.only("mlp_type", "default")
    bias = fields.boolean("use_bias", True)
    heads = read_attention(fields, num_kv_heads=2)
    ffn = read_plain(fields, activation="gelu_pytorch_tanh", up="mlp.c_fc", down="mlp.c_proj")
    layer = LayerSpec(
        attention=replace(heads, qkv_bias=bias, o_bias=bias, window=read_window(fields, None)),
        ffn=replace(ffn, bias=bias),
    )
    return read_model(
        fields,
        "Starcoder2ForCausalLM",
        [layer] * read_num_layers(fields),
        max_positions=4096,
        norm_eps=1e-5,
        norm_kind="layer",
        norm_bias=True,
        tie_word_embeddings=True,
    )
