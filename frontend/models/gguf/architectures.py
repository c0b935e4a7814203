"""What only some architectures of GGUF files say, as config.json of transformers' class says it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from .keys import BY_LAYER, Keys
from .rope_scaling import FREQS, YARN_LOG, read_divisors, read_scaling

Config = dict[str, Any]
PREDICTING = "num_nextn_predict_layers"

# Whose layers have latent attention, and whose heads may be rotated in part.
LATENTS = frozenset(("deepseek2", "minicpm3", "mistral4"))
PARTLY_ROTATED = frozenset(
    (
        *("glm4", "glm4moe", "gptneox", "minimax-m2", "nemotron", "phi2", "phi3", "phimoe", "stablelm"),
        *("qwen35", "qwen35moe", "qwen3next"),
    )
)
_Q_RANK = "attention.q_lora_rank"
_SIGMOID = 2  # of expert_gating_func
_GROUPS = {"n_group": "expert_group_count", "topk_group": "expert_group_used_count"}
_NEVER_TURNS = 1e29  # from this divisor on a pair does not
LAYER_NORM = "attention.layer_norm_epsilon"


def _read_llama(keys: Keys) -> Config:
    """Llama and, under the same name, Mistral; with experts it is Mixtral."""
    window = keys.family_integer("attention.sliding_window", 0, low=0) or None
    if keys.get("expert_count", 0) == 0:
        if window is not None:
            names = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
            return {**names, "sliding_window": window}
        return {"attention_bias": _has_qkv_bias(keys)}
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "sliding_window": window,
    }


def _read_nothing(_keys: Keys) -> Config:
    """For a family without keys of its own."""
    return {}


def _read_qwen3_moe(keys: Keys) -> Config:
    return {
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,  # llama.cpp always scales them
    }


def _read_olmoe(keys: Keys) -> Config:
    return {
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
    }


def _read_qwen2_moe(keys: Keys) -> Config:
    return {
        **_read_olmoe(keys),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.family_integer("expert_shared_feed_forward_length"),
        "qkv_bias": _has_qkv_bias(keys),
    }


def _read_delta_net(keys: Keys) -> Config:
    """Qwen3-Next's and Qwen3.5's layers, dense or with experts."""
    keys.family_value("rope.dimension_sections")  # of a text's positions they are all one
    heads, size = keys.family_integer("ssm.time_step_rank"), keys.family_integer("ssm.inner_size")
    if size % heads:
        raise keys.error("ssm.inner_size", size, f"a multiple of ssm.time_step_rank={heads}")
    config = {
        "linear_num_key_heads": keys.family_integer("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": keys.family_integer("ssm.state_size"),
        "linear_value_head_dim": size // heads,
        "linear_conv_kernel_dim": keys.family_integer("ssm.conv_kernel"),
        "full_attention_interval": keys.family_integer("full_attention_interval", 4),
    }
    if "expert_count" not in keys:
        return config
    width = keys.family_integer("expert_shared_feed_forward_length")
    return {**config, **_read_qwen3_moe(keys), "shared_expert_intermediate_size": width}


def _read_routed(keys: Keys) -> Config:
    """Experts as DeepSeek V3 has them."""
    if keys.family_integer("expert_gating_func") != _SIGMOID:
        raise keys.error("expert_gating_func", keys.get("expert_gating_func"), f"{_SIGMOID}, sigmoid")
    return {
        "n_routed_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "n_shared_experts": keys.family_integer("expert_shared_count", 0, low=0),
        "first_k_dense_replace": keys.family_integer("leading_dense_block_count", 0, low=0),
        "norm_topk_prob": keys.family_flag("expert_weights_norm"),
        "routed_scaling_factor": keys.family_number("expert_weights_scale", 1.0),
    }


def _read_dots1(keys: Keys) -> Config:
    return {**_read_routed(keys), "sliding_window": None}


def _read_glm4_moe(keys: Keys) -> Config:
    groups = {name: keys.family_integer(key, 1) for name, key in _GROUPS.items()}
    return {
        **_read_routed(keys),
        **groups,
        **_read_qkv_bias(keys),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in keys.header.tensors,
    }


def _read_latents(keys: Keys) -> Config:
    """DeepSeek V2 and V3 and what has their layers, under one name; the router's scores tell them apart."""
    is_v3 = keys.family_integer("expert_gating_func", 1) == _SIGMOID
    rope_size, count = keys.integer("rope.dimension_count"), keys.integer("expert_count")
    # The first files of V3 do not say its groups, and are the only ones without that have so many experts.
    groups = (8, 4) if is_v3 and count == 256 else (1, 1)
    num_groups = keys.family_integer("expert_group_count", groups[0])
    scaling = read_scaling(keys.header, keys, rope_size)
    if scaling is not None and scaling["rope_type"] == "yarn":
        # This architecture alone stores a tenth of it, and means it for angles and scores.
        mscale = round(10 * keys.number(YARN_LOG), 6)
        scaling |= {"mscale": mscale, "mscale_all_dim": mscale}
    names = ("DeepseekV3ForCausalLM", "deepseek_v3") if is_v3 else ("DeepseekV2ForCausalLM", "deepseek_v2")
    grouped = "group_limited_greedy" if num_groups > 1 else "greedy"
    return {
        **{"architectures": [names[0]], "model_type": names[1]},
        **_read_latent_sizes(keys),
        "rope_scaling": scaling,
        "n_routed_experts": count,
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "n_shared_experts": keys.family_integer("expert_shared_count", 0, low=0),
        "first_k_dense_replace": keys.family_integer("leading_dense_block_count", 0, low=0),
        "norm_topk_prob": keys.family_flag("expert_weights_norm"),
        "routed_scaling_factor": keys.family_number("expert_weights_scale", 1.0) or 1.0,
        "n_group": num_groups,
        "topk_group": keys.family_integer("expert_group_used_count", groups[1]),
        "topk_method": "noaux_tc" if is_v3 else grouped,
    }


def _read_latent_sizes(keys: Keys) -> Config:
    """Files before key_length_mla have the sizes of heads where later ones have those of the latent."""
    rope_size = keys.integer("rope.dimension_count")
    head_size = keys.family_integer("attention.key_length_mla", keys.integer("attention.key_length"))
    default = keys.integer("attention.value_length", keys.integer("embedding_length"))
    value_size = keys.family_integer("attention.value_length_mla", default)
    if head_size <= rope_size:
        raise keys.error("rope.dimension_count", rope_size, f"less than a head's {head_size} numbers")
    return {
        "num_key_value_heads": keys.integer("attention.head_count"),
        "q_lora_rank": keys.family_integer(_Q_RANK) if _Q_RANK in keys else 0,
        "kv_lora_rank": keys.family_integer("attention.kv_lora_rank"),
        "qk_nope_head_dim": head_size - rope_size,
        "qk_rope_head_dim": rope_size,
        "v_head_dim": value_size,
    }


def _read_mistral4(keys: Keys) -> Config:
    config = _read_latents(keys)
    if config["model_type"] != "deepseek_v2":
        raise keys.error("expert_gating_func", keys.get("expert_gating_func"), "1, softmax")
    names = {"architectures": ["Mistral4ForCausalLM"], "model_type": "mistral4", "topk_method": "greedy"}
    return {**config, **names}


def _read_gpt_oss(keys: Keys) -> Config:
    scaling = read_scaling(keys.header, keys, keys.integer("rope.dimension_count", 64))
    return {
        "num_local_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "intermediate_size": keys.integer("expert_feed_forward_length"),
        "sliding_window": keys.family_integer("attention.sliding_window"),
        # llama.cpp rounds the borders of YaRN's ramp; transformers and OpenAI's own code do not.
        "rope_scaling": scaling and {**scaling, "truncate": False},
    }


def _read_phi3(keys: Keys) -> Config:
    return {
        "sliding_window": keys.family_integer("attention.sliding_window", 0, low=0) or None,
        # Where Phi3Config looks for it.
        "original_max_position_embeddings": keys.get("rope.scaling.original_context_length"),
    }


def _read_phimoe(keys: Keys) -> Config:
    config, scaling = _read_phi3(keys), read_scaling(keys.header, keys, keys.integer("rope.dimension_count"))
    if scaling is not None:
        scaling |= dict.fromkeys(("short_mscale", "long_mscale"), scaling.pop("attention_factor", 1.0))
    return {
        **config,
        **_read_qkv_bias(keys),
        "rope_scaling": scaling,
        "num_local_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "lm_head_bias": "output.bias" in keys.header.tensors,
    }


def _read_starcoder(keys: Keys) -> Config:
    return {**_read_gpt2(keys), "multi_query": keys.integer("attention.head_count_kv") == 1}


def _read_falcon(keys: Keys) -> Config:
    """llama.cpp writes nothing of the two generations: their norms and heads tell them apart."""
    num_heads, num_kv_heads = keys.integer("attention.head_count"), keys.integer("attention.head_count_kv", 1)
    num_norms = 2 if "blk.0.attn_norm_2.weight" in keys.header.tensors else 1
    return {
        "num_kv_heads": num_kv_heads,
        "ffn_hidden_size": keys.integer("feed_forward_length"),
        "layer_norm_epsilon": keys.number(LAYER_NORM),
        "new_decoder_architecture": num_norms == 2 or 1 < num_kv_heads < num_heads,
        "num_ln_in_parallel_attn": num_norms,
        "bias": _has_qkv_bias(keys),
        "num_key_value_heads": None,
        "intermediate_size": None,
    }


def _read_gemma2(keys: Keys) -> Config:
    return {
        "query_pre_attn_scalar": _read_query_scalar(keys, num_layers_of_27b=46),
        "attn_logit_softcapping": keys.family_number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.family_number("final_logit_softcapping", 30.0),
        "sliding_window": keys.family_integer("attention.sliding_window", 4096),
    }


def _read_gemma3(keys: Keys) -> Config:
    return {
        "query_pre_attn_scalar": _read_query_scalar(keys, num_layers_of_27b=62),
        "final_logit_softcapping": keys.family_number("final_logit_softcapping"),
        # Of files without these two, llama.cpp and transformers make different models.
        "sliding_window": keys.family_integer("attention.sliding_window"),
        "rope_theta": keys.number("rope.freq_base", low=1.0),
        "sliding_window_pattern": keys.family_integer("attention.sliding_window_pattern", 6),
        "rope_local_base_freq": keys.family_number("rope.freq_base_swa", 1e4),
    }


def _read_gemma4(keys: Keys) -> Config:
    head_size, sliding_size = (keys.family_integer(f"attention.key_length{end}") for end in ("", "_swa"))
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if (size := keys.family_integer(key, sliding_size)) != sliding_size:
            raise keys.error(key, size, f"{sliding_size}, as attention.key_length_swa")
    num_layers, tensors = keys.integer("block_count"), keys.header.tensors
    pattern = keys.family_value("attention.sliding_window_pattern")
    if not isinstance(pattern, list) or len(cast(list[Any], pattern)) != num_layers:
        raise keys.error(
            "attention.sliding_window_pattern", pattern, f"a list for {num_layers} layers, not alike"
        )
    full = cast(list[Any], pattern).index(False)
    heads, widths = (keys.by_layer.get(key, [keys.integer(key)] * num_layers) for key in BY_LAYER)
    if any(len(each) != num_layers for each in (heads, widths)):
        raise keys.error(BY_LAYER[0], f"{len(heads)} and {len(widths)} entries", f"{num_layers}, one a layer")
    divisors = read_divisors(keys.header, FREQS, head_size)
    num_turning = sum(each < _NEVER_TURNS for each in divisors)
    if divisors[:num_turning] != [1.0] * num_turning:
        raise keys.error(
            FREQS, divisors[:num_turning], "1 for each pair that turns, before those that do not"
        )
    rope = {"rope_type": "proportional", "partial_rotary_factor": 2 * num_turning / head_size}
    sliding_theta = keys.family_number("rope.freq_base_swa", 1e4)
    table = tensors.get("per_layer_token_embd.weight")
    has_experts = "expert_count" in keys and keys.get("expert_count") != 0
    return {
        "num_key_value_heads": heads[cast(list[Any], pattern).index(True)],
        "num_global_key_value_heads": heads[full],
        "head_dim": sliding_size,
        "global_head_dim": head_size,
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in tensors,
        "layer_types": ["sliding_attention" if slides else "full_attention" for slides in pattern],
        "sliding_window": keys.family_integer("attention.sliding_window"),
        "num_kv_shared_layers": keys.family_integer("attention.shared_kv_layers", 0, low=0),
        "use_double_wide_mlp": widths[0] != widths[-1],
        "hidden_size_per_layer_input": keys.family_integer("embedding_length_per_layer_input", 0, low=0),
        "vocab_size_per_layer_input": None if table is None else table.shape[0],
        "final_logit_softcapping": keys.family_number("final_logit_softcapping"),
        "rope_parameters": {
            "full_attention": {**rope, "rope_theta": keys.number("rope.freq_base", low=1.0)},
            "sliding_attention": {"rope_type": "default", "rope_theta": sliding_theta},
        },
        "enable_moe_block": has_experts,
        "num_experts": keys.integer("expert_count") if has_experts else None,
        "top_k_experts": keys.integer("expert_used_count") if has_experts else None,
        "moe_intermediate_size": keys.integer("expert_feed_forward_length") if has_experts else None,
    }


def _read_granite(keys: Keys) -> Config:
    names = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    return {name: keys.family_number(key) for name, key in names.items()}


def _read_granite_moe(keys: Keys) -> Config:
    experts = _read_olmoe(keys)
    return {**_read_granite(keys), **experts, "num_local_experts": experts["num_experts"]}


def _read_minimax_m2(keys: Keys) -> Config:
    if keys.family_integer("expert_gating_func") != _SIGMOID:
        raise keys.error("expert_gating_func", keys.get("expert_gating_func"), f"{_SIGMOID}, sigmoid")
    return {**_read_olmoe(keys), "intermediate_size": keys.integer("expert_feed_forward_length")}


def _has_qkv_bias(keys: Keys) -> bool:
    return not keys.header.tensors.keys().isdisjoint(("blk.0.attn_q.bias", "blk.0.attn_qkv.bias"))


def _read_qkv_bias(keys: Keys) -> Config:
    """Of families whose switch is for these three alone."""
    return {"attention_bias": _has_qkv_bias(keys)}


def _read_windows(keys: Keys) -> Config:
    """`layer_types` where a window is of some layers only."""
    window = keys.family_integer("attention.sliding_window", 0, low=0) or None
    pattern = keys.family_value("attention.sliding_window_pattern")
    if window is None or not isinstance(pattern, list):
        return {"sliding_window": window, "sliding_window_pattern": pattern}
    kinds = ["sliding_attention" if slides else "full_attention" for slides in cast(list[Any], pattern)]
    return {"sliding_window": window, "layer_types": kinds}


def _read_cohere(keys: Keys) -> Config:
    scale = keys.family_number("logit_scale", 0.0625)
    return {"layer_norm_eps": keys.number(LAYER_NORM), "logit_scale": scale}


def _read_cohere2(keys: Keys) -> Config:
    return {**_read_cohere(keys), "sliding_window": keys.family_integer("attention.sliding_window")}


def _read_starcoder2(keys: Keys) -> Config:
    return {
        "norm_epsilon": keys.number(LAYER_NORM),
        "use_bias": _has_qkv_bias(keys),
    }


def _read_layer_norms(keys: Keys) -> Config:
    return {"layer_norm_eps": keys.number(LAYER_NORM)}


def _read_gpt2(keys: Keys) -> Config:
    names = {
        "n_embd": "embedding_length",
        "n_head": "attention.head_count",
        "n_inner": "feed_forward_length",
        "n_layer": "block_count",
        "n_positions": "context_length",
    }
    sizes = {name: keys.integer(key) for name, key in names.items()}
    others = ("hidden_size", "head_dim", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    absent = dict.fromkeys((*others, "max_position_embeddings", "rope_theta"))
    return {**sizes, **absent, "layer_norm_epsilon": keys.number(LAYER_NORM)}


def _read_gpt_neox(keys: Keys) -> Config:
    rotated, heads = keys.integer("rope.dimension_count"), keys.integer("attention.head_count")
    return {
        **_read_layer_norms(keys),
        "rotary_pct": rotated / max(1, keys.integer("embedding_length") // heads),
        "rotary_emb_base": keys.number("rope.freq_base", 10000.0, low=1.0),
        "partial_rotary_factor": None,
        "rope_theta": None,
        "use_parallel_residual": keys.family_flag("use_parallel_residual"),
    }


def _read_nemotron(keys: Keys) -> Config:
    return {
        "norm_eps": keys.number(LAYER_NORM),
        "attention_bias": _has_qkv_bias(keys),
        "mlp_bias": "blk.0.ffn_up.bias" in keys.header.tensors,
    }


def _read_jais2(keys: Keys) -> Config:
    tensors = keys.header.tensors
    return {**_read_layer_norms(keys), **_read_qkv_bias(keys), "mlp_bias": "blk.0.ffn_up.bias" in tensors}


def _read_stablelm(keys: Keys) -> Config:
    """As llama.cpp it looks for tensors: the converter writes a use_parallel_residual of its own."""
    keys.family_value("use_parallel_residual")
    return {
        **_read_layer_norms(keys),
        "use_qkv_bias": _has_qkv_bias(keys),
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in keys.header.tensors,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in keys.header.tensors,
    }


def _read_olmo(keys: Keys) -> Config:
    """Its epsilon is a constant of transformers' class, and of float32 in the file."""
    return {"rms_norm_eps": round(keys.number(LAYER_NORM), 10)}


def _read_olmo2(keys: Keys) -> Config:
    """OLMo 3 too, which has windows."""
    config = _read_windows(keys)
    if config["sliding_window"] is None:
        return {}
    sliding_theta = keys.family_number("rope.freq_base_swa", keys.number("rope.freq_base", 10000.0, low=1.0))
    names = {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"}
    return {**config, **names, "rope_local_base_freq": sliding_theta}


def _read_apertus(keys: Keys) -> Config:
    names = ("alpha_p", "alpha_n", "beta", "eps")
    each = [keys.header.metadata.get(f"xielu.{name}") for name in names]
    return {"hidden_act": "xielu", "qk_norm": True, "xielu": dict(zip(names, each, strict=True))}


def _read_hunyuan_moe(keys: Keys) -> Config:
    width = keys.integer("expert_feed_forward_length")
    shared = keys.family_integer("expert_shared_feed_forward_length", width)
    if shared != width or keys.family_integer("expert_shared_count", 1) != 1:
        raise keys.error("expert_shared_feed_forward_length", shared, f"{width}, of one shared expert")
    return {
        "num_experts": keys.integer("expert_count"),
        "moe_topk": keys.integer("expert_used_count"),
        "intermediate_size": width,
    }


def _read_ernie_moe(keys: Keys) -> Config:
    keys.family_value("expert_shared_feed_forward_length")  # as the tensors say
    return {
        "moe_num_experts": keys.integer("expert_count"),
        "moe_k": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "moe_num_shared_experts": keys.family_integer("expert_shared_count", 0, low=0),
        "moe_layer_start_index": keys.family_integer("leading_dense_block_count", 0, low=0),
        "moe_layer_interval": keys.family_integer("interleave_moe_layer_step", 1),
    }


def _read_llama4(keys: Keys) -> Config:
    """llama.cpp knows the windows and scales of queries, and that the largest model norms no heads."""
    count = keys.integer("expert_count")
    return {
        "intermediate_size": keys.integer("expert_feed_forward_length"),
        "intermediate_size_mlp": keys.integer("feed_forward_length"),
        "num_local_experts": count,
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "interleave_moe_layer_step": keys.family_integer("interleave_moe_layer_step", 1),
        "use_qk_norm": count != 128,
    }


def _read_minicpm3(keys: Keys) -> Config:
    """Its scales are constants of llama.cpp, and defaults of transformers' class."""
    sizes = _read_latent_sizes(keys)
    heads = keys.integer("attention.head_count")
    return {**sizes, "v_head_dim": keys.integer("embedding_length") // heads}


def _read_text_of_qwen_vl(keys: Keys) -> Config:
    """A text has the same position in all sections, and no picture's states are added to its layers."""
    keys.family_value("rope.dimension_sections")
    keys.family_value("n_deepstack_layers")
    return _read_qwen3_moe(keys) if "expert_count" in keys else {}


def _read_query_scalar(keys: Keys, num_layers_of_27b: int) -> int:
    """What Gemma scales scores by; the largest model alone has another number, which no key tells."""
    hidden_size, num_heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    if keys.integer("block_count") == num_layers_of_27b:
        return hidden_size // num_heads
    return keys.integer("attention.key_length", max(1, hidden_size // num_heads))


# By general.architecture: config.json's architecture and model_type, and what only this family has.
ARCHITECTURES: dict[str, tuple[str, str, Callable[[Keys], Config]]] = {
    "apertus": ("ApertusForCausalLM", "apertus", _read_apertus),
    "arcee": ("ArceeForCausalLM", "arcee", _read_nothing),
    "cohere2": ("Cohere2ForCausalLM", "cohere2", _read_cohere2),
    "command-r": ("CohereForCausalLM", "cohere", _read_cohere),
    "deepseek2": ("DeepseekV3ForCausalLM", "deepseek_v3", _read_latents),
    "dots1": ("Dots1ForCausalLM", "dots1", _read_dots1),
    "ernie4_5": ("Ernie4_5ForCausalLM", "ernie4_5", _read_nothing),
    "ernie4_5-moe": ("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", _read_ernie_moe),
    "exaone4": ("Exaone4ForCausalLM", "exaone4", _read_windows),
    "falcon": ("FalconForCausalLM", "falcon", _read_falcon),
    "gemma": ("GemmaForCausalLM", "gemma", _read_nothing),
    "gemma2": ("Gemma2ForCausalLM", "gemma2", _read_gemma2),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text", _read_gemma3),
    "gemma4": ("Gemma4ForCausalLM", "gemma4_text", _read_gemma4),
    "glm4": ("Glm4ForCausalLM", "glm4", _read_qkv_bias),
    "glm4moe": ("Glm4MoeForCausalLM", "glm4_moe", _read_glm4_moe),
    "gpt-oss": ("GptOssForCausalLM", "gpt_oss", _read_gpt_oss),
    "gpt2": ("GPT2LMHeadModel", "gpt2", _read_gpt2),
    "gptneox": ("GPTNeoXForCausalLM", "gpt_neox", _read_gpt_neox),
    "granite": ("GraniteForCausalLM", "granite", _read_granite),
    "granitemoe": ("GraniteMoeForCausalLM", "granitemoe", _read_granite_moe),
    "hunyuan-dense": ("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", _read_nothing),
    "hunyuan-moe": ("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", _read_hunyuan_moe),
    "jais2": ("Jais2ForCausalLM", "jais2", _read_jais2),
    "llama": ("LlamaForCausalLM", "llama", _read_llama),
    "llama4": ("Llama4ForCausalLM", "llama4_text", _read_llama4),
    "minicpm3": ("MiniCPM3ForCausalLM", "minicpm3", _read_minicpm3),
    "minimax-m2": ("MiniMaxM2ForCausalLM", "minimax_m2", _read_minimax_m2),
    "mistral3": ("Ministral3ForCausalLM", "ministral3", _read_nothing),
    "mistral4": ("Mistral4ForCausalLM", "mistral4", _read_mistral4),
    "nemotron": ("NemotronForCausalLM", "nemotron", _read_nemotron),
    "olmo": ("OlmoForCausalLM", "olmo", _read_olmo),
    "olmo2": ("Olmo2ForCausalLM", "olmo2", _read_olmo2),
    "olmoe": ("OlmoeForCausalLM", "olmoe", _read_olmoe),
    "phi2": ("PhiForCausalLM", "phi", _read_layer_norms),
    "phi3": ("Phi3ForCausalLM", "phi3", _read_phi3),
    "phimoe": ("PhimoeForCausalLM", "phimoe", _read_phimoe),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", _read_nothing),
    "qwen2moe": ("Qwen2MoeForCausalLM", "qwen2_moe", _read_qwen2_moe),
    "qwen2vl": ("Qwen2ForCausalLM", "qwen2", _read_text_of_qwen_vl),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", _read_nothing),
    "qwen35": ("Qwen3_5ForCausalLM", "qwen3_5_text", _read_delta_net),
    "qwen35moe": ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", _read_delta_net),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe", _read_qwen3_moe),
    "qwen3next": ("Qwen3NextForCausalLM", "qwen3_next", _read_delta_net),
    "qwen3vl": ("Qwen3ForCausalLM", "qwen3", _read_text_of_qwen_vl),
    "qwen3vlmoe": ("Qwen3MoeForCausalLM", "qwen3_moe", _read_text_of_qwen_vl),
    "seed_oss": ("SeedOssForCausalLM", "seed_oss", _read_qkv_bias),
    "smollm3": ("SmolLM3ForCausalLM", "smollm3", _read_nothing),
    "stablelm": ("StableLmForCausalLM", "stablelm", _read_stablelm),
    "starcoder": ("GPTBigCodeForCausalLM", "gpt_bigcode", _read_starcoder),
    "starcoder2": ("Starcoder2ForCausalLM", "starcoder2", _read_starcoder2),
}
# By config.json's architecture, the names in GGUF files; llama.cpp has Mistral and Mixtral as Llama.
GGUF_NAMES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("MistralForCausalLM", "MixtralForCausalLM"), ("llama",)),
    "Olmo3ForCausalLM": ("olmo2",),
    "DeepseekV2ForCausalLM": ("deepseek2",),
}
for _name, (_architecture, _, _) in ARCHITECTURES.items():
    GGUF_NAMES[_architecture] = (*GGUF_NAMES.get(_architecture, ()), _name)
