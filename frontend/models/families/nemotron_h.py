"""Nemotron-H and Nano 2: each layer is Mamba-2, attention without rotation, or a network without a gate."""

from __future__ import annotations

import math
from typing import Any

from msgspec.structs import replace

from ....ipc.spec.model_spec import DenseSpec, EmbeddingSpec, LayerSpec, ModelSpec, RopeConfig
from ....ipc.spec.recurrent_spec import MAX_KERNEL_SIZE, Mamba2Spec
from .config_fields import ConfigFields
from .parts import read_activation, read_attention, read_model

_OF_PATTERN = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_OLD = {"mamba": "linear_attention", "attention": "full_attention"}
_QKV = "mixer.q_proj", "mixer.k_proj", "mixer.v_proj"


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json. Experts are refused."""
    fields.ignore("mamba_expand", "expand", "mamba_proj_bias", "mamba_ssm_cache_dtype", "num_logits_to_keep")
    fields.ignore("residual_in_fp32", "rescale_prenorm_residual", "sliding_window", "num_hidden_layers")
    fields.ignore("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "time_step_limit")
    fields.ignore("mtp_layers_block_type", "use_mamba_kernels", "num_nextn_predict_layers")
    fields.only("attention_bias", False)  # transformers has none
    fields.ignore("routed_scaling_factor", "norm_topk_prob", "mtp_hybrid_override_pattern")
    fields.ignore(*(key for key in fields if "moe" in key or "expert" in key or "group" in key))
    fields.rename(rms_norm_eps="layer_norm_epsilon")
    heads = replace(read_attention(fields, num_kv_heads=8, head_size=128), qkv=_QKV)
    bias = fields.boolean("mlp_bias", False)
    each = {
        "linear_attention": LayerSpec(recurrent=_read_mamba2(fields), attention_norm="norm", ffn_norm=None),
        "full_attention": LayerSpec(
            attention=replace(heads, out="mixer.o_proj"), attention_norm="norm", ffn_norm=None
        ),
        "mlp": LayerSpec(
            ffn=DenseSpec(
                intermediate_size=fields.integer("intermediate_size", 21504),
                activation=read_activation(fields, "mlp_hidden_act", "relu2"),
                is_gated=False,
                bias=bias,
                up="mixer.up_proj",
                down="mixer.down_proj",
            ),
            attention_norm=None,
            ffn_norm="norm",
        ),
    }
    kinds: Any = fields.get("layers_block_type", fields.get("layer_types"))
    if kinds is None:
        kinds = [_OF_PATTERN.get(each, each) for each in str(fields.get("hybrid_override_pattern", ""))]
    layers = [each.get(_OLD.get(str(kind), str(kind))) for kind in kinds]
    found = [layer for layer in layers if layer is not None]
    if not found or len(found) < len(layers):
        raise fields.error("layers_block_type", kinds, f"some of {', '.join(each)}")
    return read_model(
        fields,
        "NemotronHForCausalLM",
        found,
        max_positions=4096,
        norm_eps=1e-5,
        rope=RopeConfig(type="none"),
        norm="model.norm_f",
        embedding=EmbeddingSpec(tokens="model.embeddings"),
        stored_prefixes=(("backbone.", "model."),),
        unused_tensors=("mtp.",),
    )


def _read_mamba2(fields: ConfigFields) -> Mamba2Spec:
    fields.only("mamba_hidden_act", "silu")
    num_heads, groups = fields.integer("mamba_num_heads", 128), fields.integer("n_groups", 8)
    if num_heads % groups:
        raise fields.error("n_groups", groups, f"a divisor of {num_heads} heads")
    return Mamba2Spec(
        num_heads=num_heads,
        head_size=fields.integer("mamba_head_dim", 64),
        num_groups=groups,
        num_rows=fields.integer("ssm_state_size", 128),
        kernel_size=fields.integer("conv_kernel", 4, low=2, high=MAX_KERNEL_SIZE),
        bias=fields.boolean("use_bias", False),
        conv_bias=fields.boolean("use_conv_bias", True),
        step_limit=(fields.number("time_step_min", 0.001, low=0), math.inf),
        name="mixer",
    )
