"""The class of transformers that a config.json names, without weights; and which cannot be served."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from ....ipc.errors import ModelError, shorten

# Keys that choose other code, other files or other weights than the class' own.
_LEFT_OUT = frozenset(
    {
        *("attn_implementation", "_attn_implementation", "_attn_implementation_internal"),
        *("experts_implementation", "_experts_implementation", "_experts_implementation_internal"),
        *("auto_map", "custom_pipelines", "fusion_config", "transformers_weights", "distributed_config"),
        *("dtype", "torch_dtype", "gradient_checkpointing", "output_attentions", "output_hidden_states"),
        *("output_router_logits", "return_dict", "use_return_dict", "_name_or_path", "transformers_version"),
    }
)
_MAX_LAYERS = 10_000
_MAX_SHOWN = 300  # characters of an error of transformers or torch
OWN_ATTENTION = "one that calls transformers' attention interface, the only way to our cache"
# Kinds of layers whose attention our cache and masks have.
_LAYER_TYPES = ("full_attention", "sliding_attention")


def is_wrapped(values: Mapping[str, Any]) -> bool:
    """Whether a config.json has its decoder's as a part, beside those of towers."""
    return isinstance(values.get("text_config"), dict)


def make_config(values: Mapping[str, Any]) -> Any:
    """transformers' config of the decoder in a config.json. ModelError says what is none, or too large."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        code = "; code of a checkpoint (auto_map) is never run" if values.get("auto_map") else ""
        raise ModelError("config.json model_type", model_type, f"one that transformers knows{code}")
    if values.get("quantization_config") is not None:
        method = shorten(values["quantization_config"])
        text = "absent: transformers' code reads plain checkpoints here (quantization='int4' narrows them)"
        raise ModelError("config.json quantization_config", method, text)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cls = CONFIG_MAPPING[model_type]
            kept = cls._decode_special_floats(_leave_out(dict(values)))  # pyright: ignore
            config = cls.from_dict(kept)
    except Exception as error:
        raise ModelError("config.json", model_type, f"what transformers takes: {explain(error)}") from error
    if config.is_encoder_decoder:
        text = "a decoder: this one's encoder has an input of its own"
        raise ModelError("config.json is_encoder_decoder", True, text)
    if is_wrapped(values):
        if "tie_word_embeddings" in values:
            config.text_config.tie_word_embeddings = bool(values["tie_word_embeddings"])
        config = config.text_config
    return config


def _leave_out(values: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in values.items() if key not in _LEFT_OUT}
    parts = {
        key: _leave_out(cast(dict[str, Any], value)) for key, value in kept.items() if isinstance(value, dict)
    }
    return kept | parts


def find_class(config: Any, values: Mapping[str, Any]) -> type[Any]:
    """The decoder's class. ModelError names what is no decoder, and what has a state beside its attention."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    field, name = "config.json architectures", config.model_type
    architectures: Any = None if is_wrapped(values) else values.get("architectures")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        text = f"a decoder: transformers has no ...ForCausalLM for model_type {name!r}"
        raise ModelError(field, values.get("architectures"), text)
    mapped: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    classes = cast(tuple[type[Any], ...], mapped if isinstance(mapped, (tuple, list)) else (mapped,))
    names = [each.__name__ for each in classes]
    wanted = cast(list[Any], architectures) if isinstance(architectures, list) else []
    cls = next((each for each in classes if each.__name__ in (wanted or names)), None)
    if cls is None:
        raise ModelError(field, architectures, f"{' or '.join(names)}, which transformers has for {name!r}")
    layers = getattr(config, "num_hidden_layers", None)
    if type(layers) is not int or not 0 < layers <= _MAX_LAYERS:
        raise ModelError("config.json num_hidden_layers", layers, f"an integer from 1 to {_MAX_LAYERS}")
    kinds = set(getattr(config, "layer_types", None) or ()) - set(_LAYER_TYPES)
    if kinds:
        text = f"layers of {' and '.join(_LAYER_TYPES)} only"
        raise ModelError("config.json layer_types", sorted(map(str, kinds))[0], text)
    if getattr(cls, "_is_stateful", False):
        text = "a decoder without recurrent layers, whose state has no place beside the KV cache"
        raise ModelError(field, values.get("architectures"), text)
    return cls


def make_empty(cls: type[Any], config: Any, attention: str, experts: str = "eager") -> Any:
    """The model with parameters and buffers that have no memory. ModelError as transformers says it."""
    parts = (getattr(config, name, None) for name in getattr(config, "sub_configs", ()))
    for part in (config, *(each for each in parts if each is not None)):
        part._attn_implementation = attention
        part._experts_implementation = experts
        part.use_cache = False
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = cls(config)
    except Exception as error:
        is_unknown = isinstance(error, KeyError) and error.args == (attention,)
        text = OWN_ATTENTION if is_unknown else f"what transformers can build; it ends with {explain(error)}"
        raise ModelError("config.json architectures", cls.__name__, text) from error
    return model.eval()


@torch.inference_mode()
def run_empty(model: Any, ids: Tensor, positions: Tensor) -> Tensor:
    """Logits of one prompt. Raises whatever code of transformers raises."""
    seen = torch.ones_like(ids, dtype=torch.bool)  # without it padding and packed prompts are sought
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model(input_ids=ids, position_ids=positions, attention_mask=seen, use_cache=False).logits


def find_body(model: Any) -> nn.Module:
    """The part between token ids and hidden states, after which logits are computed."""
    return getattr(model, model.base_model_prefix)


def find_experts(model: nn.Module) -> list[nn.Module]:
    """The modules that hold all experts of a layer in one tensor a projection."""
    return [module for module in model.modules() if hasattr(type(module), "_apply_gate")]


def explain(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_MAX_SHOWN]}"
