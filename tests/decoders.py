"""Random tiny decoders of further families, made with transformers: a family is a row of DECODERS.

The row brings all checks of worker/test_families.py. checkpoints.RECIPES has the families whose layers differ
most, which many more tests take: a family joins these only for an operation that none of them has.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from checkpoints import OTHERS, Checkpoint, make_checkpoint
from quire.frontend.models.families import read_model_spec
from quire.frontend.models.model_folder import pocket_folder
from quire.worker.first_calls import make_first_calls
from torch import nn

# What a row changes; None takes the default of the family's class.
_SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 131,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
_NO_HEAD_DIM = {"head_dim": None}
_ABSENT = (("head_dim", None), ("num_key_value_heads", None))  # of classes that do not know them
_WINDOWS = {"sliding_window": 13, "num_hidden_layers": 4}
# Of experts as DeepSeek V3 has them.
_ROUTED: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
}
# Heads of layers without a window are larger; the last layers read keys and values of the last before them.
_GEMMA4: dict[str, Any] = {
    **_WINDOWS,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 12.0,
}
_GEMMA4_INPUTS: dict[str, Any] = {
    **_GEMMA4,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 24,
    "vocab_size_per_layer_input": 2050,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
}
_FALCON: dict[str, Any] = {
    **{"hidden_size": 64, "ffn_hidden_size": 80, "num_key_value_heads": None},
    **_NO_HEAD_DIM,
}
# Of latent attention; sizes that AMX's tiles take, and others.
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": None,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
_LATENT_YARN = {**_YARN, "factor": 16.0, "mscale": 0.7, "mscale_all_dim": 0.9}
_INDEXED = {**_LATENT, **_ROUTED, "index_topk": 256, "index_head_dim": 16, "index_n_heads": 4}
# Heads that are no multiple of 16 numbers, in groups.
_MAMBA2: dict[str, Any] = {
    "hidden_size": 64,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "mamba_d_conv": 3,
    "mamba_expand": 2,
    "head_dim": None,
}
# transformers' class, and the fields of its configuration beside _SIZES. A default of the class may be far
# too large for a test: give every size.
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "apertus": ("ApertusForCausalLM", {"rope_parameters": _LLAMA3}),
    "arcee": ("ArceeForCausalLM", {"rope_parameters": _YARN, "mlp_bias": True}),
    "cohere": ("CohereForCausalLM", {"logit_scale": 0.7, "hidden_size": 64, **_NO_HEAD_DIM}),
    "cohere2": ("Cohere2ForCausalLM", {"logit_scale": 0.3, "hidden_size": 64, **_WINDOWS, **_NO_HEAD_DIM}),
    "cwm": ("CwmForCausalLM", {**_WINDOWS, "bos_token_id": 1, "rope_parameters": _LLAMA3}),
    "deepseek_v2": (
        "DeepseekV2ForCausalLM",
        {
            **_LATENT,
            **_ROUTED,
            **{"kv_lora_rank": 48, "q_lora_rank": None, "first_k_dense_replace": 1},
            **{"topk_method": "group_limited_greedy", "rope_parameters": _LATENT_YARN},
        },
    ),
    "deepseek_v2-greedy": (
        "DeepseekV2ForCausalLM",
        {**_LATENT, **_ROUTED, "n_group": None, "topk_group": None, "attention_bias": True},
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {**_LATENT, **_ROUTED, "first_k_dense_replace": 1, "rope_parameters": _LATENT_YARN},
    ),
    "deepseek_v32": ("DeepseekV32ForCausalLM", {**_INDEXED, "first_k_dense_replace": 1}),
    "ernie4_5": ("Ernie4_5ForCausalLM", {"use_bias": True, "tie_word_embeddings": True}),
    "exaone4": ("Exaone4ForCausalLM", {**_WINDOWS, "rope_parameters": _LLAMA3}),
    "exaone4-full": (
        "Exaone4ForCausalLM",
        {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    ),
    "falcon": ("FalconForCausalLM", {**_FALCON, "num_kv_heads": 4}),
    "falcon-groups": (
        "FalconForCausalLM",
        {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
    ),
    "falcon-sequential": (
        "FalconForCausalLM",
        {**_FALCON, "multi_query": False, "parallel_attn": False, "tie_word_embeddings": False},
    ),
    "gemma4": ("Gemma4ForCausalLM", _GEMMA4),
    "gemma4-experts": (
        "Gemma4ForCausalLM",
        {
            **_GEMMA4,
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 32,
        },
    ),
    "gemma4-inputs": ("Gemma4ForCausalLM", _GEMMA4_INPUTS),
    "glm": ("GlmForCausalLM", {}),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", {**_LATENT, **_ROUTED, "rope_interleave": False}),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", {**_INDEXED, "mlp_layer_types": ["sparse", "dense"]}),
    "glm4": ("Glm4ForCausalLM", {"partial_rotary_factor": 0.25}),
    "gpt2": (
        "GPT2LMHeadModel",
        {"hidden_size": 64, "n_inner": 80, "num_key_value_heads": None, **_NO_HEAD_DIM},
    ),
    "gpt_bigcode": (
        "GPTBigCodeForCausalLM",
        {"hidden_size": 64, "n_inner": 80, "num_key_value_heads": None, **_NO_HEAD_DIM},
    ),
    "gpt_bigcode-heads": (
        "GPTBigCodeForCausalLM",
        {
            **{"hidden_size": 64, "n_inner": 80, "num_key_value_heads": None, "multi_query": False},
            **_NO_HEAD_DIM,
        },
    ),
    "gptj": (
        "GPTJForCausalLM",
        {"hidden_size": 64, "n_inner": 80, "rotary_dim": 8, "num_key_value_heads": None, **_NO_HEAD_DIM},
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", {"hidden_size": 64, "num_key_value_heads": None, **_NO_HEAD_DIM}),
    "gpt_neox-sequential": (
        "GPTNeoXForCausalLM",
        {
            "hidden_size": 64,
            "num_key_value_heads": None,
            "rotary_pct": 0.5,
            "use_parallel_residual": False,
            **_NO_HEAD_DIM,
        },
    ),
    "granite": (
        "GraniteForCausalLM",
        {
            "embedding_multiplier": 6.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.3,
            "logits_scaling": 1.7,
            "attention_bias": True,
        },
    ),
    "granite4": (
        "GraniteMoeHybridForCausalLM",
        {
            "shared_intermediate_size": 64,
            "num_local_experts": 0,
            "layer_types": ["full_attention"] * 2,
            "position_embedding_type": "rope",
            "residual_multiplier": 0.3,
            "mamba_n_heads": 4,
        },
    ),
    "granite4-hybrid": (
        "GraniteMoeHybridForCausalLM",
        {
            **_MAMBA2,
            "shared_intermediate_size": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mamba_n_groups": 1,
            "residual_multiplier": 0.3,
        },
    ),
    "nemotron-h": (
        "NemotronHForCausalLM",
        {
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
            "num_hidden_layers": 5,
            "mamba_num_heads": 4,
            "mamba_head_dim": 20,
            "n_groups": 2,
            "ssm_state_size": 24,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
            "mlp_bias": True,
            "hidden_size": 64,
            "head_dim": 16,
        },
    ),
    "bamba": ("BambaForCausalLM", {**_MAMBA2, "num_hidden_layers": 3, "attn_layer_indices": [1]}),
    "lfm2": (
        "Lfm2ForCausalLM",
        {
            "num_hidden_layers": 5,
            "layer_types": ["conv", "full_attention", "conv", "full_attention", "conv"],
            "conv_L_cache": 4,
            "conv_bias": True,
            "block_multiple_of": 16,
            "head_dim": None,
            "hidden_size": 64,
        },
    ),
    "lfm2-moe": (
        "Lfm2MoeForCausalLM",
        {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "conv", "full_attention"],
            "num_dense_layers": 1,
            "moe_intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "head_dim": None,
            "hidden_size": 64,
        },
    ),
    "helium": ("HeliumForCausalLM", {"attention_bias": True, "hidden_size": 64}),
    "hunyuan": (
        "HunYuanDenseV1ForCausalLM",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 1.0, "alpha": 50.0}},
    ),
    "jais2": ("Jais2ForCausalLM", {"hidden_size": 64}),
    "ministral": (
        "MinistralForCausalLM",
        {**_WINDOWS, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "ministral3": (
        "Ministral3ForCausalLM",
        {
            "rope_parameters": {
                **_YARN,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.5,
            }
        },
    ),
    "mistral": ("MistralForCausalLM", {"sliding_window": 13, "num_key_value_heads": 1}),
    "nemotron": ("NemotronForCausalLM", {"mlp_bias": True}),
    "olmo": ("OlmoForCausalLM", {"hidden_size": 64, **_NO_HEAD_DIM}),
    "minicpm3": (
        "MiniCPM3ForCausalLM",
        {**_LATENT, "scale_emb": 3.0, "scale_depth": 0.7, "dim_model_base": 16},
    ),
    "mistral4": (
        "Mistral4ForCausalLM",
        {
            **{**_LATENT, **_ROUTED, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
            "rope_parameters": {
                **{**_LATENT_YARN, "llama_4_scaling_beta": 0.5, "partial_rotary_factor": 8 / 24},
            },
        },
    ),
    "olmo3": (
        "Olmo3ForCausalLM",
        {
            **_WINDOWS,
            "rope_parameters": {
                "full_attention": _YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "opt": (
        "OPTForCausalLM",
        {"hidden_size": 64, "ffn_dim": 80, "num_key_value_heads": None, **_NO_HEAD_DIM},
    ),
    "phi": ("PhiForCausalLM", {"hidden_size": 64, **_NO_HEAD_DIM}),
    "phimoe": (
        "PhimoeForCausalLM",
        {
            "hidden_size": 64,
            **{"num_local_experts": 8, "attention_bias": True, "lm_head_bias": True, "sliding_window": 13},
            "router_jitter_noise": 0.3,  # so that others count for an expert's weight
            **_NO_HEAD_DIM,
        },
    ),
    "seed_oss": ("SeedOssForCausalLM", {"attention_out_bias": True}),
    "stablelm": ("StableLmForCausalLM", {"hidden_size": 64, "use_qkv_bias": True, **_NO_HEAD_DIM}),
    "stablelm-parallel": (
        "StableLmForCausalLM",
        {"hidden_size": 64, "use_parallel_residual": True, **_NO_HEAD_DIM},
    ),
    "starcoder2": ("Starcoder2ForCausalLM", {"hidden_size": 64, "sliding_window": 13, **_NO_HEAD_DIM}),
    "vaultgemma": ("VaultGemmaForCausalLM", {"sliding_window": 13, "query_pre_attn_scalar": 24}),
    "gpt-oss": (
        "GptOssForCausalLM",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "sliding_window": 13,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 16.0,
                "truncate": False,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "qwen2-moe": (
        "Qwen2MoeForCausalLM",
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "mlp_only_layers": [1],
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 13,
            "hidden_size": 64,
        },
    ),
    "olmoe": ("OlmoeForCausalLM", {"num_experts": 8, "num_experts_per_tok": 3, "hidden_size": 64}),
    "flex-olmo": ("FlexOlmoForCausalLM", {"num_experts": 8, "num_experts_per_tok": 3, "hidden_size": 64}),
    "dots1": (
        "Dots1ForCausalLM",
        {
            **_ROUTED,
            "first_k_dense_replace": 1,
            "num_hidden_layers": 3,
            "sliding_window": 13,
            "max_window_layers": 2,
            "norm_topk_prob": True,
        },
    ),
    "glm4-moe": (
        "Glm4MoeForCausalLM",
        {
            **_ROUTED,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
            "attention_bias": True,
            "num_mtp_layers": 0,
        },
    ),
    "minimax-m2": (
        "MiniMaxM2ForCausalLM",
        {"num_local_experts": 8, "num_experts_per_tok": 3, "rotary_dim": 8},
    ),
    "ernie4.5-moe": (
        "Ernie4_5_MoeForCausalLM",
        {
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_intermediate_size": 32,
            "use_bias": True,
            "num_hidden_layers": 3,
            "hidden_size": 64,
            "tie_word_embeddings": False,
        },
    ),
    "hunyuan-moe": ("HunYuanMoEV1ForCausalLM", {"num_experts": 8, "moe_topk": 3}),
    "granite-moe": (
        "GraniteMoeForCausalLM",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.5,
            "hidden_size": 64,
        },
    ),
    "solar-open": ("SolarOpenForCausalLM", {**_ROUTED, "norm_topk_prob": False, "first_k_dense_replace": 1}),
}
DECODERS["llama4"] = (
    "Llama4ForCausalLM",
    {
        "num_local_experts": 8,
        "intermediate_size_mlp": 64,
        "interleave_moe_layer_step": 2,
        "num_hidden_layers": 4,
        "no_rope_layer_interval": 3,
        "attention_chunk_size": 512,
        "floor_scale": 16,
        "attn_scale": 0.5,
        "rope_parameters": _LLAMA3,
        "attention_bias": True,
    },
)
# Of the gated delta rule: heads share keys, and sizes are whole vectors or not.
_DELTA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 16,
    "head_dim": 32,
}
_SPARSE: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
DECODERS["qwen3-next"] = ("Qwen3NextForCausalLM", {**_DELTA, **_SPARSE, "mlp_only_layers": [0]})
DECODERS["qwen3.5"] = (
    "Qwen3_5ForCausalLM",
    {**_DELTA, "linear_key_head_dim": 16, "linear_value_head_dim": 40, "tie_word_embeddings": True},
)
DECODERS["qwen3.5-moe"] = (
    "Qwen3_5MoeForCausalLM",
    {**_DELTA, **_SPARSE, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
)
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 48}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
# Text models inside of others: fields of text_config beside _SIZES, then those of the whole.
WRAPPED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "wrapped-gemma3": (
        "Gemma3ForConditionalGeneration",
        {
            "sliding_window": 13,
            "num_hidden_layers": 3,
            "query_pre_attn_scalar": 24,
            "sliding_window_pattern": 2,
        },
        {"vision_config": _VISION, "mm_tokens_per_image": 4},
    ),
    "wrapped-gemma4": (
        "Gemma4ForConditionalGeneration",
        {
            **_GEMMA4_INPUTS,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 1,
            "pad_token_id": 0,
        },
        {"vision_config": _VISION},
    ),
    "wrapped-gemma4-unified": (
        "Gemma4UnifiedForConditionalGeneration",
        {**{key: value for key, value in _GEMMA4.items() if "per_layer" not in key}, "pad_token_id": 0},
        {},
    ),
    "wrapped-ministral3": (
        "Mistral3ForConditionalGeneration",
        {"model_type": "ministral3", "rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.5}},
        {"vision_config": _VISION, "tie_word_embeddings": False},
    ),
    "wrapped-mistral": (
        "Mistral3ForConditionalGeneration",
        {"model_type": "mistral"},
        {"vision_config": _VISION},
    ),
    "wrapped-llama": ("LlavaForConditionalGeneration", {"model_type": "llama"}, {"vision_config": _VISION}),
    "wrapped-qwen2": (
        "InternVLForConditionalGeneration",
        {"model_type": "qwen2"},
        {"vision_config": _VISION},
    ),
    "wrapped-smolvlm": (
        "SmolVLMForConditionalGeneration",
        {"model_type": "llama"},
        {"vision_config": _VISION},
    ),
    "wrapped-glm4v": (
        "Glm4vForConditionalGeneration",
        {
            "rope_parameters": {**_MROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
            "hidden_size": 64,
            **_NO_HEAD_DIM,
        },
        {"vision_config": {**_QWEN_VISION, "out_hidden_size": 64, "image_size": 28}},
    ),
    "wrapped-qwen2.5-vl": (
        "Qwen2_5_VLForConditionalGeneration",
        {"rope_parameters": _MROPE, **_NO_HEAD_DIM, "hidden_size": 64},
        {"vision_config": {**_QWEN_VISION, "out_hidden_size": 64, "fullatt_block_indexes": [0]}},
    ),
    "wrapped-qwen3-vl": (
        "Qwen3VLForConditionalGeneration",
        {"rope_parameters": {**_MROPE, "mrope_interleaved": True}},
        {"vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}},
    ),
}
WRAPPED["wrapped-llama4"] = (
    DECODERS["llama4"][0].replace("CausalLM", "ConditionalGeneration"),
    DECODERS["llama4"][1],
    {
        "vision_config": {
            **_VISION,
            "vision_output_dim": 16,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
        }
    },
)
_QWEN3_VL = WRAPPED["wrapped-qwen3-vl"]
WRAPPED["wrapped-qwen3-vl-moe"] = (
    "Qwen3VLMoeForConditionalGeneration",
    {**_QWEN3_VL[1], "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32},
    _QWEN3_VL[2],
)
for _kind, _class in (("qwen3.5", "Qwen3_5"), ("qwen3.5-moe", "Qwen3_5Moe")):
    WRAPPED[f"wrapped-{_kind}"] = (
        f"{_class}ForConditionalGeneration",
        {**DECODERS[_kind][1], "rope_parameters": {**_MROPE, "partial_rotary_factor": 0.5}},
        {"vision_config": {**_QWEN_VISION, "num_position_embeddings": 16}},
    )
FAMILIES = (*DECODERS, *WRAPPED, *OTHERS)


def make_decoder(folder: Path, name: str, **more: Any) -> Checkpoint:
    """A random model of a row, saved into `folder` and kept as reference. Its spec is read from config.json.

    `more` are fields of its configuration.
    """
    if name in OTHERS:
        return make_checkpoint(folder, OTHERS[name])
    make_first_calls()
    architecture, fields, *whole = (DECODERS | WRAPPED)[name]
    model_class = getattr(transformers, architecture)
    values = {key: value for key, value in (_SIZES | fields | more).items() if (key, value) not in _ABSENT}
    config = model_class.config_class(**({"text_config": values, **whole[0]} if whole else values))
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = model_class(config).float().eval()
    randomize(model)
    model.save_pretrained(folder)
    if name == "wrapped-llama4":  # without an image transformers' class raises
        model = model.language_model
    return Checkpoint(folder, read_model_spec(json.loads((folder / "config.json").read_bytes())), model)


def add_tokenizer(folder: Path) -> Path:
    """The packaged model's, for a checkpoint of its vocabulary; the folder comes back."""
    shutil.copy(pocket_folder() / "tokenizer.json", folder)
    return folder


def randomize(model: nn.Module) -> None:
    """Nothing that a checkpoint stores stays at a constant, which an operation that is left out would be.

    Norms are around 1, as are scales and corrections that are kept as buffers.
    """
    parameters, kept = dict(model.named_parameters()), model.state_dict()
    with torch.no_grad():
        for name, tensor in kept.items():
            if name not in parameters and tensor.is_floating_point() and tensor.dim() > 0:
                tensor.uniform_(0.5, 1.5)
        for name, parameter in parameters.items():
            if parameter.dim() == 1 and name.endswith("weight"):
                is_offset = not parameter.any()  # such norms multiply by 1 more
                parameter.uniform_(0.5, 1.5).sub_(float(is_offset))
            else:
                parameter.normal_(0.0, 0.2 if parameter.dim() == 1 else 0.15)
        for module in model.modules():
            # Of normed heads whose scores are not scaled: each token would see one other, which a
            # rounding decides.
            if getattr(module, "scaling", None) == 1.0 and hasattr(module, "q_norm"):
                module.get_parameter("q_norm.weight").mul_(0.25)
