"""What a GGUF file's metadata says of the model, as config.json and generation_config.json say it.

`families` reads the result as it reads those files. A key below the architecture's name that nothing here
knows is refused by name: it may change every token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

from ....ipc.errors import ModelError
from ..families.config_fields import ConfigFields
from .header import GgufHeader
from .vocabulary import find_end_ids

Config = dict[str, Any]

# Below the architecture's name: what is read here, and what decides nothing.
_READ = (
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon",
    "attention.temperature_scale",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "expert_count",
    "expert_feed_forward_length",
    "expert_used_count",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.attn_factor",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_log_multiplier",
)
_HARMLESS = ("pooling_type", "rope.scaling.finetuned", "tensor_data_layout", "vocab_size")
# What has one value in the models that are read; another one is refused.
_NEUTRAL: dict[str, Any] = {
    "attention.causal": True,
    "expert_gating_func": 1,  # softmax
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": 0,
    "expert_weights_norm": True,
    "expert_weights_scale": (0.0, 1.0),
    "interleave_moe_layer_step": (0, 1),
    "leading_dense_block_count": 0,
    "nextn_predict_layers": 0,
}
_LATENTS, _Q_RANK = "deepseek2", "attention.q_lora_rank"
_SIGMOID = 2  # of expert_gating_func
# llama.cpp writes Llama 3's scaling as a table of divisors. All published models have these settings.
_ORIGINAL = 8192
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": _ORIGINAL}
_BY_LAYER = ("attention.head_count_kv", "feed_forward_length")  # of Gemma 4, whose layers differ
_NEVER_TURNS = 1e29  # from this divisor on a pair does not
_MAX_DIVISORS = 4096  # half a head's size; no published model has more than 256
_LAYER_NORM = "attention.layer_norm_epsilon"
_YARN_LOG, _QUERY_SCALE = "rope.scaling.yarn_log_multiplier", "attention.temperature_scale"
_FREQS, _SHORT, _LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
ROPE_TABLES = (_FREQS, _SHORT, _LONG)


def read_config(header: GgufHeader) -> Config:
    """The model as config.json has it; ModelError with the file, the key, its value and what is allowed."""
    fields = ConfigFields(header.metadata, file=header.file.name)
    name = fields.get("general.architecture")
    if not isinstance(name, str) or name not in _ARCHITECTURES:
        raise fields.error("general.architecture", name, f"one of {', '.join(_ARCHITECTURES)}")
    architecture, model_type, read_own = _ARCHITECTURES[name]
    keys = _Keys(header, name)
    config: Config = {"architectures": [architecture], "model_type": model_type}
    config |= _read_common(header, keys) | read_own(keys)
    keys.check_rest()
    # Without a window is not as by default.
    return {name: value for name, value in config.items() if value is not None or name == "sliding_window"}


def read_generation_config(header: GgufHeader) -> Config:
    """Which tokens end an output."""
    ends = find_end_ids(header)
    return {"eos_token_id": ends} if ends else {}


class _Keys(ConfigFields):
    """The metadata below the architecture's name."""

    def __init__(self, header: GgufHeader, architecture: str) -> None:
        prefix = f"{architecture}."
        values = {
            key.removeprefix(prefix): _flatten(value)
            for key, value in header.metadata.items()
            if key.startswith(prefix)
        }
        # What differs by layer; elsewhere it is the first one's.
        self.by_layer: dict[str, list[Any]] = {}
        for key in _BY_LAYER if architecture == "gemma4" else ():
            if isinstance(values.get(key), list) and values[key]:
                self.by_layer[key], values[key] = values[key], values[key][0]
        super().__init__(values, prefix, header.file.name)
        self._names: set[str] = {*_READ, *_HARMLESS}
        self.header, self.architecture = header, architecture
        self._own = values

    def family_number(self, key: str, default: float | None = None) -> float | None:
        """A number that only some families have."""
        self._names.add(key)
        return self.number(key, default) if key in self or default is not None else None

    def family_integer(self, key: str, default: int | None = None, low: int = 1) -> int:
        """As `family_number`, for an integer."""
        self._names.add(key)
        return self.integer(key, default, low)

    def family_flag(self, key: str) -> bool:
        """True or false, false where it is missing, of a key that only some families have."""
        self._names.add(key)
        return self.boolean(key, False)

    def family_value(self, key: str) -> Any:
        """As `family_number`, for anything."""
        self._names.add(key)
        return self.get(key)

    def check_rest(self, owner: str = "") -> None:
        """ModelError for the first key that nobody reads."""
        for key, value in self._own.items():
            neutral = _NEUTRAL.get(key)
            allowed = neutral if isinstance(neutral, tuple) else (neutral,)
            if key not in self._names and value not in allowed:
                known = " or ".join(map(str, allowed)) if key in _NEUTRAL else "absent"
                text = f"{known}: {owner or self.architecture} is computed without it here"
                raise self.error(key, value, text)


def _flatten(value: Any) -> Any:
    """A list with an entry a layer, all of them equal, is that entry."""
    if isinstance(value, list) and value and all(each == value[0] for each in cast(list[Any], value)):
        return cast(list[Any], value)[0]
    return value


def _read_common(header: GgufHeader, keys: _Keys) -> Config:
    table = header.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        shape = None if table is None else list(table.shape)
        raise ModelError(f"{header.file.name} tensor token_embd.weight", shape, "a table [tokens, numbers]")
    hidden_size, num_heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", max(1, hidden_size // num_heads))
    rotated, has_latents = keys.integer("rope.dimension_count", head_dim), keys.architecture == _LATENTS
    value_size = keys.integer("attention.value_length", head_dim)
    if value_size != head_dim and not has_latents:
        raise keys.error("attention.value_length", value_size, f"{head_dim}, as keys have")
    return {
        "vocab_size": table.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": _read_width(keys),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        # Else a LayerNorm's, whose key each family has another name for.
        "rms_norm_eps": None if _LAYER_NORM in keys else keys.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": keys.integer("context_length"),
        "rope_theta": keys.number("rope.freq_base", 10000.0, low=1.0),
        "rope_scaling": _read_scaling(header, keys, rotated),
        "partial_rotary_factor": None if has_latents else _read_rotated(keys, head_dim),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "eos_token_id": header.metadata.get("tokenizer.ggml.eos_token_id"),
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
    }


def _read_width(keys: _Keys) -> int | None:
    """The width of the feed-forward part; a model of experts alone may have none."""
    has_width = "feed_forward_length" in keys and keys.get("feed_forward_length") != 0
    return keys.integer("feed_forward_length") if has_width or "expert_count" not in keys else None


def _read_rotated(keys: _Keys, head_dim: int) -> float | None:
    rotated = keys.integer("rope.dimension_count", head_dim)
    if rotated == head_dim:
        return None
    if keys.architecture not in ("glm4", "minimax-m2", "phi3"):
        raise keys.error("rope.dimension_count", rotated, f"{head_dim}, a whole head")
    return rotated / head_dim


def _read_scaling(header: GgufHeader, keys: _Keys, rotated_size: int) -> Config | None:
    """The rope scaling, None without one; missing values are llama.cpp's defaults."""
    if keys.architecture == "gemma4":  # whose table is of some layers only
        return None
    factor = keys.number("rope.scaling.factor", 1.0)
    kind = keys.get("rope.scaling.type", "none" if factor == 1.0 else "linear")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise keys.error("rope.scaling.type", kind, "one of none, linear, yarn, longrope")
    is_longrope = kind == "longrope" or _LONG in header.tensors
    # They multiply what is computed, of any type.
    for key in ("yarn_attn_factor",) if is_longrope else ("attn_factor", "yarn_attn_factor"):
        if keys.number(f"rope.scaling.{key}", 1.0) != 1.0:
            raise keys.error(f"rope.scaling.{key}", keys.get(f"rope.scaling.{key}"), "1")
    if is_longrope or _FREQS in header.tensors:
        if kind != "none" and factor != 1.0:
            name = _LONG if is_longrope else _FREQS
            raise keys.error("rope.scaling.factor", factor, f"1 beside the tensor {name}")
        return (_read_longrope if is_longrope else _read_llama3)(header, keys, rotated_size)
    if kind == "none":
        return None
    scaling: Config = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        trained = keys.integer("context_length")
        original = keys.integer("rope.scaling.original_context_length", trained)
        scaling["original_max_position_embeddings"] = original
        names = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
        for name, key in names.items():
            if f"rope.scaling.{key}" in keys:
                scaling[name] = keys.number(f"rope.scaling.{key}")
        if _YARN_LOG in keys:
            scaling |= {"mscale": 1.0, "mscale_all_dim": keys.number(_YARN_LOG)}
        if _QUERY_SCALE in keys:
            scaling["llama_4_scaling_beta"] = keys.number(_QUERY_SCALE)
    return scaling


def _read_divisors(header: GgufHeader, name: str, rotated_size: int) -> list[float]:
    """The divisors of the frequencies, one for each rotated pair."""
    table, size = header.tensors.get(name), rotated_size // 2
    if table is None or table.type != "F32" or table.shape != (size,) or size > _MAX_DIVISORS:
        shown = None if table is None else f"{table.type} {list(table.shape)}"
        field = f"{header.file.name} tensor {name}"
        raise ModelError(field, shown, f"F32 {[size]}, of at most {_MAX_DIVISORS}")
    return list(table.read_floats())


def _read_longrope(header: GgufHeader, keys: _Keys, rotated_size: int) -> Config:
    return {
        "rope_type": "longrope",
        "original_max_position_embeddings": keys.integer("rope.scaling.original_context_length"),
        "attention_factor": keys.number("rope.scaling.attn_factor", 1.0),
        "short_factor": _read_divisors(header, _SHORT, rotated_size),
        "long_factor": _read_divisors(header, _LONG, rotated_size),
    }


def _read_llama3(header: GgufHeader, keys: _Keys, rotated_size: int) -> Config:
    """The settings that a table of divisors was made with."""
    stored = _read_divisors(header, _FREQS, rotated_size)
    factor, theta = max(stored), keys.number("rope.freq_base", 10000.0, low=1.0)
    made = make_llama3_divisors(factor, theta, rotated_size) if 1 <= factor < math.inf else []
    is_same = (math.isclose(factor, other, rel_tol=1e-4) for factor, other in zip(stored, made, strict=False))
    if not made or not all(is_same):
        field = f"{header.file.name} tensor {_FREQS}"
        raise ModelError(field, stored, f"Llama 3's divisors, trained for {_ORIGINAL} tokens")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def make_llama3_divisors(factor: float, theta: float, head_dim: int) -> list[float]:
    """As llama.cpp's converter makes them of a Llama 3's rope_scaling."""
    low, high, original = _LLAMA3.values()
    divisors: list[float] = []
    for index in range(0, head_dim, 2):
        turns = original / (2 * math.pi * theta ** (index / head_dim))  # within the trained length
        kept = min(1.0, max(0.0, (turns - low) / (high - low)))
        divisors.append(1 / ((1 - kept) / factor + kept))
    return divisors


def _read_llama(keys: _Keys) -> Config:
    """Llama and, under the same name, Mistral; with experts it is Mixtral."""
    window = keys.family_integer("attention.sliding_window", 0, low=0) or None
    if keys.get("expert_count", 0) == 0:
        if window is not None:
            names = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
            return {**names, "sliding_window": window}
        return {"attention_bias": "blk.0.attn_q.bias" in keys.header.tensors}
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "sliding_window": window,
    }


def _read_nothing(_keys: _Keys) -> Config:
    """For a family without keys of its own."""
    return {}


def _read_qwen3_moe(keys: _Keys) -> Config:
    return {
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,  # llama.cpp always scales them
    }


def _read_olmoe(keys: _Keys) -> Config:
    return {
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
    }


def _read_qwen2_moe(keys: _Keys) -> Config:
    return {
        **_read_olmoe(keys),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.family_integer("expert_shared_feed_forward_length"),
        "qkv_bias": "blk.0.attn_q.bias" in keys.header.tensors,
    }


def _read_dots1(keys: _Keys) -> Config:
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
        "sliding_window": None,
    }


def _read_latents(keys: _Keys) -> Config:
    """DeepSeek V2 and V3 and what has their layers, under one name; the router's scores tell them apart.

    Files before key_length_mla have the sizes of heads where later ones have those of the latent.
    """
    is_v3 = keys.family_integer("expert_gating_func", 1) == _SIGMOID
    rope_size, count = keys.integer("rope.dimension_count"), keys.integer("expert_count")
    head_size = keys.family_integer("attention.key_length_mla", keys.integer("attention.key_length"))
    value_size = keys.family_integer("attention.value_length_mla", keys.integer("attention.value_length"))
    if head_size <= rope_size:
        raise keys.error("rope.dimension_count", rope_size, f"less than a head's {head_size} numbers")
    # The first files of V3 do not say its groups, and are the only ones without that have so many experts.
    groups = (8, 4) if is_v3 and count == 256 else (1, 1)
    num_groups = keys.family_integer("expert_group_count", groups[0])
    scaling = _read_scaling(keys.header, keys, rope_size)
    if scaling is not None and scaling["rope_type"] == "yarn":
        # This architecture alone stores a tenth of it, and means it for angles and scores.
        mscale = round(10 * keys.number(_YARN_LOG), 6)
        scaling |= {"mscale": mscale, "mscale_all_dim": mscale}
    names = ("DeepseekV3ForCausalLM", "deepseek_v3") if is_v3 else ("DeepseekV2ForCausalLM", "deepseek_v2")
    grouped = "group_limited_greedy" if num_groups > 1 else "greedy"
    return {
        **{"architectures": [names[0]], "model_type": names[1]},
        "num_key_value_heads": keys.integer("attention.head_count"),
        "q_lora_rank": keys.family_integer("attention.q_lora_rank") if _Q_RANK in keys else 0,
        "kv_lora_rank": keys.family_integer("attention.kv_lora_rank"),
        "qk_nope_head_dim": head_size - rope_size,
        "qk_rope_head_dim": rope_size,
        "v_head_dim": value_size,
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


def _read_gpt_oss(keys: _Keys) -> Config:
    scaling = _read_scaling(keys.header, keys, keys.integer("rope.dimension_count", 64))
    return {
        "num_local_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "intermediate_size": keys.integer("expert_feed_forward_length"),
        "sliding_window": keys.family_integer("attention.sliding_window"),
        # llama.cpp rounds the borders of YaRN's ramp; transformers and OpenAI's own code do not.
        "rope_scaling": scaling and {**scaling, "truncate": False},
    }


def _read_phi3(keys: _Keys) -> Config:
    return {
        "sliding_window": keys.family_integer("attention.sliding_window", 0, low=0) or None,
        # Where Phi3Config looks for it.
        "original_max_position_embeddings": keys.get("rope.scaling.original_context_length"),
    }


def _read_gemma2(keys: _Keys) -> Config:
    return {
        "query_pre_attn_scalar": _read_query_scalar(keys, num_layers_of_27b=46),
        "attn_logit_softcapping": keys.family_number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.family_number("final_logit_softcapping", 30.0),
        "sliding_window": keys.family_integer("attention.sliding_window", 4096),
    }


def _read_gemma3(keys: _Keys) -> Config:
    return {
        "query_pre_attn_scalar": _read_query_scalar(keys, num_layers_of_27b=62),
        "final_logit_softcapping": keys.family_number("final_logit_softcapping"),
        # Of files without these two, llama.cpp and transformers make different models.
        "sliding_window": keys.family_integer("attention.sliding_window"),
        "rope_theta": keys.number("rope.freq_base", low=1.0),
        "sliding_window_pattern": keys.family_integer("attention.sliding_window_pattern", 6),
        "rope_local_base_freq": keys.family_number("rope.freq_base_swa", 1e4),
    }


def _read_gemma4(keys: _Keys) -> Config:
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
    heads, widths = (keys.by_layer.get(key, [keys.integer(key)] * num_layers) for key in _BY_LAYER)
    if any(len(each) != num_layers for each in (heads, widths)):
        raise keys.error(
            _BY_LAYER[0], f"{len(heads)} and {len(widths)} entries", f"{num_layers}, one a layer"
        )
    divisors = _read_divisors(keys.header, _FREQS, head_size)
    num_turning = sum(each < _NEVER_TURNS for each in divisors)
    if divisors[:num_turning] != [1.0] * num_turning:
        raise keys.error(
            _FREQS, divisors[:num_turning], "1 for each pair that turns, before those that do not"
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


def _read_granite(keys: _Keys) -> Config:
    names = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    return {name: keys.family_number(key) for name, key in names.items()}


def _read_granite_moe(keys: _Keys) -> Config:
    experts = _read_olmoe(keys)
    return {**_read_granite(keys), **experts, "num_local_experts": experts["num_experts"]}


def _read_minimax_m2(keys: _Keys) -> Config:
    if keys.family_integer("expert_gating_func") != _SIGMOID:
        raise keys.error("expert_gating_func", keys.get("expert_gating_func"), f"{_SIGMOID}, sigmoid")
    return {**_read_olmoe(keys), "intermediate_size": keys.integer("expert_feed_forward_length")}


def _read_qkv_bias(keys: _Keys) -> Config:
    """Of families whose switch is for these three alone."""
    return {"attention_bias": "blk.0.attn_q.bias" in keys.header.tensors}


def _read_exaone4(keys: _Keys) -> Config:
    window = keys.family_integer("attention.sliding_window", 0, low=0) or None
    pattern = keys.family_value("attention.sliding_window_pattern")
    if window is None or not isinstance(pattern, list):
        return {"sliding_window": window, "sliding_window_pattern": pattern}
    kinds = ["sliding_attention" if slides else "full_attention" for slides in cast(list[Any], pattern)]
    return {"sliding_window": window, "layer_types": kinds}


def _read_cohere(keys: _Keys) -> Config:
    scale = keys.family_number("logit_scale", 0.0625)
    return {"layer_norm_eps": keys.number(_LAYER_NORM), "logit_scale": scale}


def _read_cohere2(keys: _Keys) -> Config:
    return {**_read_cohere(keys), "sliding_window": keys.family_integer("attention.sliding_window")}


def _read_starcoder2(keys: _Keys) -> Config:
    return {
        "norm_epsilon": keys.number(_LAYER_NORM),
        "use_bias": "blk.0.attn_q.bias" in keys.header.tensors,
    }


def _read_query_scalar(keys: _Keys, num_layers_of_27b: int) -> int:
    """What Gemma scales scores by; the largest model alone has another number, which no key tells."""
    hidden_size, num_heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    if keys.integer("block_count") == num_layers_of_27b:
        return hidden_size // num_heads
    return keys.integer("attention.key_length", max(1, hidden_size // num_heads))


# By general.architecture: config.json's architecture and model_type, and what only this family has.
_ARCHITECTURES: dict[str, tuple[str, str, Callable[[_Keys], Config]]] = {
    "arcee": ("ArceeForCausalLM", "arcee", _read_nothing),
    "cohere2": ("Cohere2ForCausalLM", "cohere2", _read_cohere2),
    "command-r": ("CohereForCausalLM", "cohere", _read_cohere),
    _LATENTS: ("DeepseekV3ForCausalLM", "deepseek_v3", _read_latents),
    "dots1": ("Dots1ForCausalLM", "dots1", _read_dots1),
    "ernie4_5": ("Ernie4_5ForCausalLM", "ernie4_5", _read_nothing),
    "exaone4": ("Exaone4ForCausalLM", "exaone4", _read_exaone4),
    "gemma": ("GemmaForCausalLM", "gemma", _read_nothing),
    "gemma2": ("Gemma2ForCausalLM", "gemma2", _read_gemma2),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text", _read_gemma3),
    "gemma4": ("Gemma4ForCausalLM", "gemma4_text", _read_gemma4),
    "glm4": ("Glm4ForCausalLM", "glm4", _read_qkv_bias),
    "gpt-oss": ("GptOssForCausalLM", "gpt_oss", _read_gpt_oss),
    "granite": ("GraniteForCausalLM", "granite", _read_granite),
    "granitemoe": ("GraniteMoeForCausalLM", "granitemoe", _read_granite_moe),
    "hunyuan-dense": ("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", _read_nothing),
    "llama": ("LlamaForCausalLM", "llama", _read_llama),
    "minimax-m2": ("MiniMaxM2ForCausalLM", "minimax_m2", _read_minimax_m2),
    "mistral3": ("Ministral3ForCausalLM", "ministral3", _read_nothing),
    "olmo2": ("Olmo2ForCausalLM", "olmo2", _read_nothing),
    "olmoe": ("OlmoeForCausalLM", "olmoe", _read_olmoe),
    "phi3": ("Phi3ForCausalLM", "phi3", _read_phi3),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", _read_nothing),
    "qwen2moe": ("Qwen2MoeForCausalLM", "qwen2_moe", _read_qwen2_moe),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", _read_nothing),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe", _read_qwen3_moe),
    "seed_oss": ("SeedOssForCausalLM", "seed_oss", _read_qkv_bias),
    "smollm3": ("SmolLM3ForCausalLM", "smollm3", _read_nothing),
    "starcoder2": ("Starcoder2ForCausalLM", "starcoder2", _read_starcoder2),
}
# By config.json's architecture, the names in GGUF files; llama.cpp has Mistral and Mixtral as Llama.
GGUF_NAMES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("MistralForCausalLM", "MixtralForCausalLM"), ("llama",)),
    "DeepseekV2ForCausalLM": (_LATENTS,),
}
for _name, (_architecture, _, _) in _ARCHITECTURES.items():
    GGUF_NAMES[_architecture] = (*GGUF_NAMES.get(_architecture, ()), _name)
