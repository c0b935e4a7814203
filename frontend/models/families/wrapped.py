"""Text models inside of others: config.json nests theirs, and their tensors have longer names.

Only the text model is read. Where all positions are those of a text, sections of a multimodal rope are one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from msgspec.structs import replace

from ....ipc.spec.model_spec import ModelSpec, rename_stored
from .config_fields import ConfigFields

# Beginnings of stored names, and what the text model alone calls them.
STORED_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head", "lm_head"),
    ("model.text_model.", "model."),
)
# Beginnings of names that belong to no text model.
_TOWERS = (
    *("visual.", "vision_tower.", "vision_model.", "multi_modal_projector.", "connector.", "image_newline"),
    *("audio_tower.", "vision_projection.", "vision_encoder.", "embed_vision.", "embed_audio.", "mtp."),
)
UNUSED_TENSORS = (*_TOWERS, *(f"model.{name}" for name in _TOWERS))
# text_config's model_type -> the architecture that computes it, and sizes that transformers' class has for
# keys that are absent, as tools leave out what is equal to them.
_LLAMA = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000}
_QWEN = {**_LLAMA, "intermediate_size": 22016, "vocab_size": 151936}
_QWEN3_5 = {
    **{"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4},
    **{"vocab_size": 248320, "intermediate_size": 12288},
}
_QWEN2_VL = {"rms_norm_eps": 1e-5, "rope_theta": 1e6}
_QWEN3_VL = {"max_position_embeddings": 128_000, "rope_theta": 5e5}
_TEXT_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere2": ("Cohere2ForCausalLM", {}),
    "gemma3_text": (
        "Gemma3ForCausalLM",
        {
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
        },
    ),
    "gemma4_text": ("Gemma4ForCausalLM", {}),
    "gemma4_unified_text": (
        "Gemma4ForCausalLM",
        {"hidden_size_per_layer_input": 0, "sliding_window": 1024, "max_position_embeddings": 262_144},
    ),
    "glm4v_text": (
        "Glm4ForCausalLM",
        {"rms_norm_eps": 1e-5, "head_dim": None, "max_position_embeddings": 32768},
    ),
    "granite": ("GraniteForCausalLM", {**_LLAMA, "intermediate_size": 11008}),
    "llama": ("LlamaForCausalLM", {**_LLAMA, "intermediate_size": 11008}),
    "llama4_text": (
        "Llama4ForCausalLM",
        {"vocab_size": 202_048, "hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40},
    ),
    "ministral3": ("Ministral3ForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {**_LLAMA, "intermediate_size": 14336}),
    "mistral4": ("Mistral4ForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", _QWEN),
    "qwen2_vl_text": ("Qwen2ForCausalLM", _QWEN2_VL),
    "qwen2_5_vl_text": ("Qwen2ForCausalLM", _QWEN2_VL),
    "qwen3": ("Qwen3ForCausalLM", _QWEN),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", _QWEN3_5),
    "qwen3_5_moe_text": (
        "Qwen3_5MoeForCausalLM",
        {**_QWEN3_5, "hidden_size": 2048, "num_hidden_layers": 40, "num_key_value_heads": 2},
    ),
    "qwen3_vl_text": ("Qwen3ForCausalLM", _QWEN3_VL),
    "qwen3_vl_moe_text": (
        "Qwen3MoeForCausalLM",
        {
            **_QWEN3_VL,
            "norm_topk_prob": True,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "num_key_value_heads": 16,
        },
    ),
}


_VOXTRAL = {
    **{"vocab_size": 131072, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 30},
    **{"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072},
    **{"rms_norm_eps": 1e-5, "rope_theta": 1e8},
}


class _Wrapper(NamedTuple):
    """The text model's type where config.json does not say it, and whether its embeddings are tied then.

    is_tied None: they never are, as the class in transformers ties none.
    """

    text_type: str
    is_tied: bool | None = False
    sizes: Mapping[str, Any] | None = None  # its own for absent keys of the text model


# transformers leaves the text model's logit scale out in Cohere's two, which it was trained with.
_WRAPPERS = {
    "AyaVisionForConditionalGeneration": _Wrapper("cohere2", is_tied=True),
    "Cohere2VisionForConditionalGeneration": _Wrapper("cohere2", is_tied=True),
    "Gemma3ForConditionalGeneration": _Wrapper("gemma3_text", is_tied=True),
    "Gemma4ForConditionalGeneration": _Wrapper("gemma4_text", is_tied=True),
    "Gemma4UnifiedForConditionalGeneration": _Wrapper("gemma4_unified_text", is_tied=True),
    "Glm4vForConditionalGeneration": _Wrapper("glm4v_text"),
    "Idefics3ForConditionalGeneration": _Wrapper("llama"),
    "InternVLForConditionalGeneration": _Wrapper("qwen2", is_tied=True),
    "LightOnOcrForConditionalGeneration": _Wrapper("qwen3", is_tied=True),
    "Llama4ForConditionalGeneration": _Wrapper("llama4_text"),
    "LlavaForConditionalGeneration": _Wrapper("llama"),
    "LlavaNextForConditionalGeneration": _Wrapper("llama"),
    "LlavaOnevisionForConditionalGeneration": _Wrapper("qwen2"),
    "Mistral3ForConditionalGeneration": _Wrapper("mistral", is_tied=True),
    "Qwen2AudioForConditionalGeneration": _Wrapper("qwen2", is_tied=None),
    "Qwen2VLForConditionalGeneration": _Wrapper("qwen2_vl_text"),
    "Qwen2_5_VLForConditionalGeneration": _Wrapper("qwen2_5_vl_text"),
    "Qwen3VLForConditionalGeneration": _Wrapper("qwen3_vl_text"),
    "Qwen3VLMoeForConditionalGeneration": _Wrapper("qwen3_vl_moe_text"),
    "Qwen3_5ForConditionalGeneration": _Wrapper("qwen3_5_text"),
    "Qwen3_5MoeForConditionalGeneration": _Wrapper("qwen3_5_moe_text"),
    "SmolVLMForConditionalGeneration": _Wrapper("llama"),
    "VipLlavaForConditionalGeneration": _Wrapper("llama"),
    "VoxtralForConditionalGeneration": _Wrapper("llama", is_tied=None, sizes=_VOXTRAL),
}
WRAPPED_ARCHITECTURES = tuple(_WRAPPERS)
# What config.json has for the whole, and the text model's own part may have again.
_OF_THE_WHOLE = (
    *("bos_token_id", "compression_config", "dtype", "eos_token_id", "pad_token_id"),
    *("quantization_config", "torch_dtype", "transformers_version"),
)
_OF_TOWERS = ("perceiver_config", "pixel_shuffle_factor")  # in text_config too, where nothing reads them
_NAMED_LAYERS = ("ignore", "modules_to_not_convert")  # of a quantization_config


def find_wrapper(config: Mapping[str, Any]) -> str | None:
    """The architecture of config.json if it is one of these, around a text model that a family here reads."""
    names: Any = config.get("architectures")
    if not isinstance(names, list):
        return None
    known = [name for name in cast(list[Any], names) if isinstance(name, str) and name in _WRAPPERS]
    return known[0] if known and _find_text_type(config, known[0]) in _TEXT_MODELS else None


def _find_text_type(config: Mapping[str, Any], name: str) -> str | None:
    nested: Any = config.get("text_config", {})  # absent: Qwen2-VL's first ones are flat
    if not isinstance(nested, dict):
        return None
    kind: Any = cast(dict[str, Any], nested).get("model_type", _WRAPPERS[name].text_type)
    return kind if isinstance(kind, str) else None


def unwrap(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json as that of the text model in it; one without a wrapper (`find_wrapper`) is as it was."""
    name = find_wrapper(config)
    kind = None if name is None else _find_text_type(config, name)
    if name is None or kind is None:
        return dict(config)
    nested = cast(dict[str, Any], config.get("text_config", config))
    values = {key: value for key, value in nested.items() if key not in _OF_TOWERS}
    architecture, sizes = _TEXT_MODELS[kind]
    if kind == "gemma3_text":  # the class around it leaves the cap out
        ConfigFields(values, "text_config.").only("final_logit_softcapping", None)
    whole = {key: config[key] for key in _OF_THE_WHOLE if config.get(key) is not None}
    tied, is_tied = (
        (config.get("tie_word_embeddings"), values.get("tie_word_embeddings")),
        _WRAPPERS[name].is_tied,
    )
    text = {**sizes, **(_WRAPPERS[name].sizes or {}), **values, **whole, "architectures": [architecture]}
    given = next((each for each in tied if each is not None), is_tied)
    text["tie_word_embeddings"] = False if is_tied is None else given
    ropes = [key for key in ("rope_scaling", "rope_parameters") if key in text]
    text.update({key: _without_sections(text[key]) for key in ropes})
    if isinstance(settings := text.get("quantization_config"), dict):
        text["quantization_config"] = _rename_layers(cast(dict[str, Any], settings))
    return text


def with_stored_names(spec: ModelSpec) -> ModelSpec:
    """The text model's spec with what its tensors are called in the whole, and what else is there."""
    unused = (*spec.unused_tensors, *UNUSED_TENSORS)
    return replace(spec, stored_prefixes=STORED_PREFIXES, unused_tensors=unused)


def _without_sections(rope: Any) -> Any:
    if not isinstance(rope, dict):
        return rope
    values = cast(dict[str, Any], rope)
    plain = {key: value for key, value in values.items() if key not in ("mrope_section", "mrope_interleaved")}
    return {key: "default" if value == "mrope" else value for key, value in plain.items()}


def _rename_layers(settings: dict[str, Any]) -> dict[str, Any]:
    def rename(name: Any) -> Any:
        return rename_stored(name, STORED_PREFIXES) if isinstance(name, str) else name

    lists = {key: settings[key] for key in _NAMED_LAYERS if isinstance(settings.get(key), list)}
    return {**settings, **{key: [rename(name) for name in names] for key, names in lists.items()}}
