"""From a GGUF file's tensors to the names under which the loader asks for them, and to their formats."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

import msgspec

from ....ipc.errors import ModelError
from ....ipc.spec.gguf_tensor import FLOATS, FUSED, HALVES, GgmlType, GgufTensor
from ....ipc.spec.model_spec import ModelSpec
from ....ipc.spec.recurrent_spec import DeltaNetSpec, RecurrentSpec
from ....ipc.spec.weight_format import WeightFormat, WeightFormats
from .architectures import PREDICTING, Config
from .header import GgufHeader, StoredTensor
from .rope_scaling import ROPE_TABLES

_WHOLE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
# Of model types that call them otherwise, and how their layers' names begin where not with model.layers.
_GPT2_WHOLE = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
}
_OTHER_WHOLE = {
    "falcon": {"token_embd": "transformer.word_embeddings", "output_norm": "transformer.ln_f"},
    "gpt2": _GPT2_WHOLE,
    "gpt_bigcode": _GPT2_WHOLE,
    "gpt_neox": {"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm"},
    "phi": {"output_norm": "model.final_layernorm"},
}
_LAYER_PREFIXES = {
    "falcon": "transformer.h",
    "gpt2": "transformer.h",
    "gpt_bigcode": "transformer.h",
    "gpt_neox": "gpt_neox.layers",
}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_DENSE = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_PRE_NORM = {**_ATTENTION, **_DENSE, "ffn_norm": "post_attention_layernorm"}
_EXPERTS = {
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_up_exps": "mlp.experts.{}.gate_up_proj",
}
_MIXTRAL = "block_sparse_moe.experts.{}."
_BLOCK_SPARSE = {
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": f"{_MIXTRAL}w1",
    "ffn_up_exps": f"{_MIXTRAL}w3",
    "ffn_down_exps": f"{_MIXTRAL}w2",
}
_BOTH_NORMS = {
    **_ATTENTION,
    **_DENSE,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OUT_NORMS = {
    **_ATTENTION,
    **_DENSE,
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_SHARED = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_ROUTED = {
    **_PRE_NORM,
    "ffn_gate_inp": "mlp.gate",
    **_EXPERTS,
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    **_SHARED,
}
_LATENT = {
    **_ROUTED,
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj.{}",  # stacked over heads, as `attn_v_b`
    "attn_v_b": "self_attn.v_b_proj.{}",
}
_GPT2 = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_FALCON = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_DELTA_NET = {
    **_ATTENTION,
    **_DENSE,
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_SHARED_EXPERT = {
    "ffn_gate_inp": "mlp.gate",
    **_EXPERTS,
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_FEED_FORWARD = "feed_forward."
# After "blk.N."; {} is the number of an expert, over which such a tensor is stacked.
_LAYERS: dict[str, dict[str, str]] = {
    "arcee": _PRE_NORM,
    "cohere": _PRE_NORM,
    "cohere2": _PRE_NORM,
    "ernie4_5": _PRE_NORM,
    "exaone4": _OUT_NORMS,
    "gemma": _PRE_NORM,
    "glm4": {
        **_PRE_NORM,
        "ffn_up": "mlp.gate_up_proj",
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
    },
    "granite": _PRE_NORM,
    "granitemoe": {**_PRE_NORM, "ffn_gate_inp": "block_sparse_moe.router.layer", **_EXPERTS},
    "hunyuan_v1_dense": {
        **_PRE_NORM,
        "attn_q_norm": "self_attn.query_layernorm",
        "attn_k_norm": "self_attn.key_layernorm",
    },
    "llama": _PRE_NORM,
    "ministral3": _PRE_NORM,
    "mistral": _PRE_NORM,
    "olmo2": _OUT_NORMS,
    "phi3": {
        **_PRE_NORM,
        "attn_qkv": "self_attn.qkv_proj",
        "ffn_up": "mlp.gate_up_proj",
    },
    "qwen2": _PRE_NORM,
    "qwen3": _PRE_NORM,
    "qwen3_moe": {
        **_PRE_NORM,
        "ffn_gate_inp": "mlp.gate",
        **_EXPERTS,
    },
    "minimax_m2": {
        **_ATTENTION,
        **_BLOCK_SPARSE,
        "exp_probs_b": "block_sparse_moe.e_score_correction_bias",
    },
    "mixtral": {**_ATTENTION, **_BLOCK_SPARSE},
    "gemma2": _BOTH_NORMS,
    "gemma3_text": _BOTH_NORMS,
    "gemma4_text": {
        **_BOTH_NORMS,
        "layer_output_scale": "layer_scalar",
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
        "ffn_gate_inp": "router.proj",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_gate_up_exps": "experts.{}.gate_up_proj",
        "ffn_down_exps": "experts.{}.down_proj",
        "ffn_down_exps.scale": "router.per_expert_scale",
    },
    "seed_oss": {**_PRE_NORM, "post_attention_norm": "post_attention_layernorm"},
    "smollm3": _PRE_NORM,
    "starcoder2": {**_PRE_NORM, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    "gpt_oss": {
        **_ATTENTION,
        "attn_sinks": "self_attn.sinks",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.router",
        **_EXPERTS,
    },
    "olmoe": {**_PRE_NORM, "ffn_gate_inp": "mlp.gate", **_EXPERTS},
    "qwen2_moe": {**_PRE_NORM, **_SHARED_EXPERT},
    "qwen3_5_moe_text": {**_DELTA_NET, **_SHARED_EXPERT},
    "qwen3_5_text": _DELTA_NET,
    "qwen3_next": {**_DELTA_NET, **_SHARED_EXPERT},
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "dots1": _ROUTED,
    "minicpm3": _LATENT,
    "mistral4": _LATENT,
    "apertus": {
        **_ATTENTION,
        **_DENSE,
        "attn_norm": "attention_layernorm",
        "ffn_norm": "feedforward_layernorm",
    },
    "ernie4_5_moe": {**_ROUTED, "exp_probs_b": "mlp.moe_statics.e_score_correction_bias"},
    "glm4_moe": {**_ROUTED, "post_attention_norm": "post_attention_layernorm"},
    "falcon": _FALCON,
    "falcon with two norms": {**_FALCON, "attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"},
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gpt_neox": {
        "attn_norm": "input_layernorm",
        "attn_qkv": "attention.query_key_value",
        "attn_output": "attention.dense",
        "ffn_norm": "post_attention_layernorm",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    },
    "hunyuan_v1_moe": {
        **_PRE_NORM,
        "attn_q_norm": "self_attn.query_layernorm",
        "attn_k_norm": "self_attn.key_layernorm",
        "ffn_gate_inp": "mlp.gate.wg",
        **_EXPERTS,
        "ffn_gate_shexp": "mlp.shared_mlp.gate_proj",
        "ffn_up_shexp": "mlp.shared_mlp.up_proj",
        "ffn_down_shexp": "mlp.shared_mlp.down_proj",
    },
    "llama4_text": {
        **_ATTENTION,
        "ffn_norm": "post_attention_layernorm",
        **{part: name.replace("mlp.", _FEED_FORWARD) for part, name in (_DENSE | _EXPERTS).items()},
        "ffn_gate_inp": f"{_FEED_FORWARD}router",
        **{
            part: name.replace("mlp.shared_experts", f"{_FEED_FORWARD}shared_expert")
            for part, name in _SHARED.items()
        },
    },
    "nemotron": _PRE_NORM,
    "olmo": _PRE_NORM,
    "olmo3": _OUT_NORMS,
    "jais2": _PRE_NORM,
    "phimoe": {**_ATTENTION, **_BLOCK_SPARSE},
    "phi": {**_ATTENTION, "attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
    "stablelm": _PRE_NORM,
}
_BARE = (  # tensors whose name has no .weight or .bias
    *("self_attn.sinks", "e_score_correction_bias"),
    *("layer_scalar", "router.scale", "router.per_expert_scale"),
    *("linear_attn.A_log", "linear_attn.dt_bias"),
)
_ADDED_ONE = frozenset(
    ("gemma", "gemma2", "gemma3_text", "nemotron", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
)  # model types whose norms are stored as what they multiply by
_PAIRED = frozenset(
    ("arcee", "granite", "granitemoe", "llama", "ministral3", "mistral", "mixtral", "olmo", "smollm3")
)  # whose queries and keys llama.cpp's converter has reordered
_NAME = re.compile(
    r"(?:blk\.(\d{1,5})\.)?([a-z_]{1,40}(?:_\d|1d)?)(?:\.(\d{1,5}))?(?:\.(weight|bias|scale))?"
)


def name_tensors(headers: Sequence[GgufHeader], config: Config) -> tuple[GgufTensor, ...]:
    """The table for the worker, by the model that `config` describes.

    ModelError for a tensor that the model does not have, or one that is in two of the files.
    """
    tensors: dict[str, GgufTensor] = {}
    for index, header in enumerate(headers):
        for stored in header.tensors.values():
            if stored.name in ROPE_TABLES or _predicts(stored, config):  # config.py has read the tables
                continue
            for part in _split_qkv(header, stored, config):
                tensor = msgspec.structs.replace(_name(header, part, config), file=index)
                if tensor.name in tensors:
                    raise _error(header, stored, "a name that comes once in all files")
                tensors[tensor.name] = tensor
    return tuple(tensors.values())


def _predicts(stored: StoredTensor, config: Config) -> bool:
    """Whether it is of a layer after the last, which predicts further tokens."""
    first = _count_layers(config)
    layer = re.match(r"blk\.(\d{1,5})\.", stored.name)
    return layer is not None and first <= int(layer[1]) < first + config.get(PREDICTING, 0)


def _count_layers(config: Config) -> int:
    return config.get("n_layer") or config["num_hidden_layers"]


def _split_qkv(header: GgufHeader, stored: StoredTensor, config: Config) -> list[StoredTensor]:
    """Queries, keys and values of a tensor that holds all of a model that has them apart; else it alone."""
    if ".attn_qkv." not in stored.name or "attn_qkv" in _LAYERS[config["model_type"]]:
        return [stored]
    size, num_heads = config["head_dim"], config["num_attention_heads"]
    counts = [size * num_heads, *[size * config["num_key_value_heads"]] * 2]
    if not stored.shape or stored.shape[0] != sum(counts):
        raise _error(header, stored, f"{sum(counts)} rows, of queries, keys and values")
    parts: list[StoredTensor] = []
    row_bytes, first = stored.size_bytes // stored.shape[0], 0
    for letter, count in zip("qkv", counts, strict=True):
        parts.append(
            replace(
                stored,
                name=stored.name.replace("attn_qkv", f"attn_{letter}"),
                shape=(count, *stored.shape[1:]),
                offset=stored.offset + first * row_bytes,
                size_bytes=count * row_bytes,
            )
        )
        first += count
    return parts


def as_converted(spec: ModelSpec) -> ModelSpec:
    """The model of such a file: its linear layers are stored by output, queries before keys and values."""
    layers = [
        msgspec.structs.replace(
            layer,
            attention=msgspec.structs.replace(layer.attention, qkv_by_group=False),
            recurrent=_as_converted(layer.recurrent),
        )
        for layer in spec.layers
    ]
    return msgspec.structs.replace(spec, layers=tuple(layers), transposed_linears=False)


def _as_converted(spec: RecurrentSpec | None) -> RecurrentSpec | None:
    if not isinstance(spec, DeltaNetSpec):
        return spec
    # Qwen3-Next's converter is older than the order of value heads that its successors' files have.
    is_fused = len(spec.projections) == 1
    return msgspec.structs.replace(
        spec,
        projections=("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
        is_tiled=not is_fused,
        rate_is_log=False,
    )


def _name(header: GgufHeader, stored: StoredTensor, config: Config) -> GgufTensor:
    kind, shape = config["model_type"], stored.shape
    match = _NAME.fullmatch(stored.name)
    if match is None or (match[4] is None and match[2] != "ssm_a"):
        raise _error(header, stored, f"the name of a tensor of {kind}")
    layer, part, expert, suffix = match.groups()
    if layer is None:
        name = (_WHOLE | _OTHER_WHOLE.get(kind, {})).get(part)
    else:
        part = f"{part}.scale" if suffix == "scale" else part
        has_two = config.get("num_ln_in_parallel_attn") == 2
        # Files of 2023 have a tensor an expert.
        name = _LAYERS[f"{kind} with two norms" if has_two else kind].get(
            part if expert is None else f"{part}_exps"
        )
    num_layers = _count_layers(config)
    if name is None or (layer is not None and int(layer) >= num_layers):
        raise _error(header, stored, f"a tensor of {kind} with {num_layers} layers")
    if expert is not None:
        name = name.format(int(expert))
    if name.endswith("shared_expert_gate"):  # llama.cpp takes both
        shape = (1, shape[-1])
    is_vector = suffix == "bias" or "norm" in part or name.endswith(_BARE)
    if is_vector:  # ERNIE's corrections have a row
        shape = shape[shape[0] == 1 and len(shape) > 1 :]
    if name.count("{}") + (1 if is_vector else 2) != len(shape):
        raise _error(header, stored, "another number of dimensions")
    if len(shape) == 1 and stored.type not in FLOATS:
        raise _error(header, stored, f"one of {', '.join(FLOATS)} for a tensor of one dimension")
    if layer is not None:
        name = f"{_LAYER_PREFIXES.get(kind, 'model.layers')}.{int(layer)}.{name}"
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    num_heads = config[heads[part]] if kind in _PAIRED and part in heads else 0
    if num_heads and shape[0] % (2 * num_heads):
        raise _error(header, stored, f"a multiple of {2 * num_heads} rows, two for each of {num_heads} heads")
    has_added_one = kind in _ADDED_ONE and "norm" in part and part != "ssm_norm" and suffix == "weight"
    if not name.endswith(_BARE):
        name = f"{name}.{suffix}"
    return GgufTensor(name, stored.type, shape, 0, stored.offset, num_heads, has_added_one)


def _error(header: GgufHeader, stored: StoredTensor, allowed: str) -> ModelError:
    field = f"{header.file.name} tensor {stored.type}{list(stored.shape)}"
    return ModelError(field, stored.name, allowed)


# bits, numbers of a group, and whether a group has an offset (worker/weights/gguf.py).
_FORMS: dict[GgmlType, tuple[Literal[4, 8], int, bool]] = {
    "Q8_0": (8, 32, False),
    "Q4_0": (4, 32, False),
    "Q4_1": (4, 32, True),
    "Q5_0": (8, 32, False),
    "Q5_1": (8, 32, True),
    "Q2_K": (4, 16, True),
    "Q3_K": (4, 16, False),
    "Q4_K": (4, 32, True),
    "Q5_K": (8, 32, True),
    "Q6_K": (8, 16, False),
    "IQ4_NL": (8, 32, False),
    "IQ4_XS": (8, 32, False),
    "MXFP4": (4, 32, False),
}
# Projections of the same inputs are one layer in memory, which has a format or is plain.
_SAME_INPUTS = re.compile(r"\b(?:[qkv]|gate|up)_proj$|\bw[13]$|\bin_proj_(?:qkv|z|[ab])$")


def make_formats(tensors: Sequence[GgufTensor], spec: ModelSpec) -> WeightFormats:
    """Of all matrices; the most common one is the default. A tied table has its own under its own name."""
    formats = {
        name: _make_format(tensor.type)
        for tensor in tensors
        if tensor.name.endswith(".weight") and len(tensor.shape) > 1
        for name in _list_names(tensor)
    }
    plain = {_find_together(name) for name, format in formats.items() if format is None}
    formats = {name: None if _find_together(name) in plain else format for name, format in formats.items()}
    if not spec.tie_word_embeddings:  # the table is looked up, and not multiplied with
        formats.pop(spec.embedding.tokens, None)
    counts = Counter(formats.values())
    default = max(counts, key=lambda format: counts[format], default=None)
    exceptions = {name: format for name, format in formats.items() if format != default}
    tied = formats.get(spec.embedding.tokens)
    if tied is not None:
        exceptions[spec.embedding.tokens] = tied
    return WeightFormats(default=default, exceptions=exceptions)


def _find_together(name: str) -> str:
    """Equal for all projections of one layer in memory."""
    return _SAME_INPUTS.sub(lambda match: "ba" if match[0] in ("in_proj_a", "in_proj_b") else "", name)


def _make_format(type_: GgmlType) -> WeightFormat | None:
    if type_ not in _FORMS:
        return None
    bits, group_size, has_offsets = _FORMS[type_]
    return WeightFormat(
        bits=bits,
        group_size=group_size,
        has_offsets=has_offsets,
        has_codebook=type_ == "MXFP4",
        scale_dtype="bfloat16" if type_ == "MXFP4" else "float32",
        layout="gguf",
    )


def _list_names(tensor: GgufTensor) -> Iterable[str]:
    name = tensor.name.removesuffix(".weight")
    each = map(name.format, range(tensor.shape[0])) if "{}" in name else (name,)
    if "{}" not in name or not name.endswith(FUSED):
        return each
    return (expert.removesuffix(FUSED) + part for expert in each for part in HALVES)
