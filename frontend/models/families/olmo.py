"""OLMo, the first: Llama with LayerNorms that have no weights."""

from __future__ import annotations

from ....ipc.spec.model_spec import LayerSpec, ModelSpec
from .config_fields import ConfigFields
from .parts import read_attention, read_dense, read_model, read_num_layers

_EPS = 1e-5  # a constant of its code


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    fields.only("clip_qkv", None)
    fields.only("rms_norm_eps", _EPS)
    layer = LayerSpec(attention=read_attention(fields, may_have_bias=True), ffn=read_dense(fields))
    return read_model(
        fields,
        "OlmoForCausalLM",
        [layer] * read_num_layers(fields),
        max_positions=2048,
        norm_eps=_EPS,
        norm_kind="layer",
        norm_has_weight=False,
    )
