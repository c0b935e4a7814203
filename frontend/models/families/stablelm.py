"""StableLM: Llama with LayerNorms, a quarter of each head rotated; parts of a layer may be parallel."""

from __future__ import annotations

from msgspec.structs import replace

from ....ipc.spec.model_spec import LayerSpec, ModelSpec
from .config_fields import ConfigFields
from .parts import read_attention, read_dense, read_model, read_num_layers
from .rope import read_rope


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    fields.rename(rms_norm_eps="layer_norm_eps")
    fields.only("qk_layernorm", False)
    fields.ignore("norm_eps")  # of first exports, beside the key that counts
    max_positions = fields.integer("max_position_embeddings", 4096)
    heads = read_attention(fields, num_kv_heads=32)
    is_parallel = fields.boolean("use_parallel_residual", False)
    layer = LayerSpec(
        attention=replace(heads, qkv_bias=fields.boolean("use_qkv_bias", False)),
        ffn=read_dense(fields),
        ffn_norm=None if is_parallel else "post_attention_layernorm",
        is_parallel=is_parallel,
    )
    return read_model(
        fields,
        "StableLmForCausalLM",
        [layer] * read_num_layers(fields),
        max_positions,
        norm_eps=1e-5,
        rope=read_rope(fields, max_positions, head_size=heads.head_size, rotated_share=0.25),
        norm_kind="layer",
        norm_bias=True,
    )
