"""config.json and generation_config.json -> ModelShape, number format, end tokens and length limit.

Takes dicts, touches no file. Defaults are those of transformers' config class of each family, so a key that
transformers lets a checkpoint leave out may be left out here. Whatever a native model cannot compute is
refused here, by key and value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast, get_args

from ..ipc.config import MAX_INT, NATIVE_ARCHITECTURES, Activation, Dtype, ModelShape, RopeConfig, RopeType
from ..ipc.errors import ConfigError, ModelError, SamplingParamsError, shorten
from ..ipc.messages import MAX_EOS_TOKEN_IDS
from ..ipc.sampling_params import SamplingParams

_ARCHITECTURE_OF_TYPE = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
# What generation_config.json may preset, and SamplingParams' name for it.
_SAMPLING_KEYS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
# What is computed from the settings of rope and norms is finite in float32 when they are within these.
_MIN_NUMBER, _MAX_NUMBER = 1e-20, 1e20
_MAX_LAYERS = 10_000  # of a description's entries a layer; no published model has a tenth of it


@dataclass(frozen=True, slots=True)
class _FamilyDefaults:
    """What transformers assumes for a key that config.json leaves out."""

    num_kv_heads: int | None  # None: as many as heads
    head_size: int | None  # None: hidden_size / heads
    max_position_embeddings: int


_DEFAULTS = {
    "LlamaForCausalLM": _FamilyDefaults(None, None, 2048),
    "MistralForCausalLM": _FamilyDefaults(8, None, 131072),
    "Qwen2ForCausalLM": _FamilyDefaults(32, None, 32768),
    "Qwen3ForCausalLM": _FamilyDefaults(32, 128, 32768),
}


class _Fields:
    """Typed reading of one JSON object; `prefix` names the object in errors."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self._values = values
        self._prefix = prefix

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def integer(self, key: str, default: int | None = None, low: int = 1, high: int = MAX_INT) -> int:
        value = self._values.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.error(key, value, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, default: float | None = None, low: float = _MIN_NUMBER) -> float:
        """A number from `low` to _MAX_NUMBER."""
        value = self._values.get(key)
        value = default if value is None else value
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self.error(key, value, "a number")
        if not low <= value <= _MAX_NUMBER:  # also of an integer beyond the largest float, and of NaN
            raise self.error(key, value, f"a number from {low:g} to {_MAX_NUMBER:g}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """As `number`; an absent key, null and 0 are None (transformers tests them for truth)."""
        return self.number(key) if self._values.get(key) else None

    def boolean(self, key: str, default: bool) -> bool:
        value = self._values.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.error(key, value, "true or false")
        return value

    def error(self, key: str, value: object, allowed: str) -> ModelError:
        missing = "missing; " if value is None else ""
        return ModelError(f"config.json {self._prefix}{key}", value, f"{missing}{allowed}")


def read_model_shape(config: Mapping[str, Any]) -> ModelShape:
    """Describe the decoder of config.json; ModelError names a key that is missing or unsupported."""
    architecture = _read_architecture(config)
    fields = _Fields(config)
    if config.get("quantization_config") is not None:
        raise ModelError(
            "config.json quantization_config", config["quantization_config"], "none (weights in float)"
        )
    defaults = _DEFAULTS[architecture]
    num_layers = fields.integer("num_hidden_layers", high=_MAX_LAYERS)
    num_heads, num_kv_heads, head_size = _read_heads(fields, defaults)
    max_positions = fields.integer("max_position_embeddings", defaults.max_position_embeddings)
    rope = _read_rope(config, max_positions)
    if rope.type == "dynamic" and head_size <= 2:  # the grown base's exponent has head_size - 2 as divisor
        raise fields.error("head_dim", head_size, "above 2 with dynamic rope scaling")
    window, layer_is_sliding = _read_windows(fields, architecture, num_layers)
    has_bias_flag = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM")
    attention_bias = has_bias_flag and fields.boolean("attention_bias", False)
    return ModelShape(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_position_embeddings=max_positions,
        rope=rope,
        sliding_window=window,
        layer_is_sliding=layer_is_sliding,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        o_bias=attention_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and fields.boolean("mlp_bias", False),
        has_qk_norm=architecture == "Qwen3ForCausalLM",
        activation=_read_activation(fields),
    )


def read_dtype(config: Mapping[str, Any], stored_dtype: str | None) -> Dtype:
    """The number format to compute in: config.json's, else that of the stored weights, else float32."""
    key = "dtype" if config.get("dtype") is not None else "torch_dtype"
    value = config.get(key)
    name = stored_dtype or "float32" if value is None else str(value).removeprefix("torch.")
    for dtype in get_args(Dtype):
        if name == dtype:
            return dtype
    raise ModelError(f"config.json {key}", value, f"one of {', '.join(get_args(Dtype))}")


def read_eos_token_ids(
    config: Mapping[str, Any], generation_config: Mapping[str, Any], vocab_size: int
) -> tuple[int, ...]:
    """End-of-sequence ids: generation_config.json's if it names any, else config.json's."""
    for name, values in (("generation_config.json", generation_config), ("config.json", config)):
        value = values.get("eos_token_id")
        if value is None:
            continue
        ids = cast(list[Any], value) if isinstance(value, list) else [value]
        for token_id in ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab_size:
                raise ModelError(f"{name} eos_token_id", value, f"token ids from 0 to {vocab_size - 1}")
        distinct = tuple(dict.fromkeys(ids))
        if len(distinct) > MAX_EOS_TOKEN_IDS:  # each request carries them
            raise ModelError(f"{name} eos_token_id", f"{len(distinct)} ids", f"at most {MAX_EOS_TOKEN_IDS}")
        return distinct
    return ()


def read_default_sampling(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """SamplingParams fields that generation_config.json presets. Raises ModelError for a bad value."""
    presets: dict[str, Any] = {}
    for key, name in _SAMPLING_KEYS.items():
        value = generation_config.get(key)
        if value is None:
            continue
        try:
            SamplingParams(**{name: value})
        except SamplingParamsError as error:
            raise ModelError(f"generation_config.json {key}", value, error.allowed) from None
        presets[name] = value
    return presets


def compute_max_model_len(shape: ModelShape, requested: int | None) -> int:
    """The longest sequence (prompt and output) of an engine, in tokens.

    The model's own limit is max_position_embeddings, times the factor where rope scaling stretches it
    (linear, dynamic, yarn; llama3's already counts). A larger request raises ConfigError.
    """
    rope = shape.rope
    limit = shape.max_position_embeddings
    if rope.type == "yarn" and rope.original_max_position_embeddings is not None:
        limit = rope.original_max_position_embeddings
    if rope.type in ("linear", "dynamic", "yarn"):
        limit = int(min(limit * rope.factor, MAX_INT))
    if requested is None:
        return limit
    if not isinstance(requested, int) or isinstance(requested, bool) or requested < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError("max_model_len", requested, f"an integer from 1 to {limit}, the model's limit")
    if requested > limit:
        raise ConfigError("max_model_len", requested, f"at most {limit}, the model's limit (config.json)")
    return requested


def _read_architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    if not names:
        names = [_ARCHITECTURE_OF_TYPE.get(str(config.get("model_type")), config.get("model_type"))]
    if isinstance(names, list):
        for name in cast(list[Any], names):
            if name in NATIVE_ARCHITECTURES:
                return str(name)
    raise ModelError("config.json architectures", names, f"one of {', '.join(NATIVE_ARCHITECTURES)}")


def _read_heads(fields: _Fields, defaults: _FamilyDefaults) -> tuple[int, int, int]:
    """(heads, key/value heads, head size)."""
    num_heads = fields.integer("num_attention_heads")
    if "num_key_value_heads" in fields:  # null means as many as heads, in every family
        num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    else:
        num_kv_heads = defaults.num_kv_heads or num_heads
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", num_kv_heads, f"a divisor of {num_heads} attention heads")
    hidden_size = fields.integer("hidden_size")
    default = defaults.head_size if "head_dim" not in fields else None
    if default is None and fields.get("head_dim") is None:
        if hidden_size % num_heads:
            raise fields.error("hidden_size", hidden_size, f"a multiple of num_attention_heads={num_heads}")
        default = hidden_size // num_heads
    head_size = fields.integer("head_dim", default)
    if head_size % 2:
        raise fields.error("head_dim", head_size, "an even number (rotary embedding turns pairs)")
    return num_heads, num_kv_heads, head_size


def _read_windows(fields: _Fields, architecture: str, num_layers: int) -> tuple[int | None, tuple[bool, ...]]:
    """(window in tokens or None, which layers have it; empty means all or none)."""
    if architecture == "LlamaForCausalLM":
        return None, ()
    if architecture == "MistralForCausalLM":
        if "sliding_window" in fields and fields.get("sliding_window") is None:
            return None, ()
        return fields.integer("sliding_window", 4096), ()
    if not fields.boolean("use_sliding_window", False):
        return None, ()
    if "sliding_window" in fields and fields.get("sliding_window") is None:
        return None, ()
    window = fields.integer("sliding_window", 4096)
    is_sliding = _read_layer_types(fields, num_layers)
    if all(is_sliding):
        return window, ()
    return (window, is_sliding) if any(is_sliding) else (None, ())


def _read_layer_types(fields: _Fields, num_layers: int) -> tuple[bool, ...]:
    kinds = fields.get("layer_types")
    if kinds is None:
        first = fields.integer("max_window_layers", 28, low=0)
        return tuple(layer >= first for layer in range(num_layers))
    allowed = f"{num_layers} of 'full_attention' and 'sliding_attention'"
    if not isinstance(kinds, list) or len(cast(list[Any], kinds)) != num_layers:
        raise fields.error("layer_types", kinds, allowed)
    for kind in cast(list[Any], kinds):
        if kind not in ("full_attention", "sliding_attention"):
            raise fields.error("layer_types", kind, allowed)
    return tuple(kind == "sliding_attention" for kind in cast(list[Any], kinds))


def _read_activation(fields: _Fields) -> Activation:
    name = fields.get("hidden_act")
    activation = _ACTIVATIONS.get("silu" if name is None else str(name))
    if activation is None:
        raise fields.error("hidden_act", name, f"one of {', '.join(_ACTIVATIONS)}")
    return activation


def _read_rope(config: Mapping[str, Any], max_positions: int) -> RopeConfig:
    """Rotary settings of `rope_scaling` (`rope_theta` beside it) or `rope_parameters` (theta inside)."""
    # transformers lets rope_scaling win where a checkpoint has both.
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    values: Any = config.get(name) or {}
    if not isinstance(values, dict):
        raise ModelError(f"config.json {name}", values, "an object")
    rope = _Fields(cast(dict[str, Any], values), f"{name}.")
    rotated = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor")
    if rotated not in (None, 1):
        raise rope.error("partial_rotary_factor", rotated, "1 (the whole head is rotated)")
    if any(isinstance(value, dict) for value in cast(dict[str, Any], values).values()):
        raise ModelError(f"config.json {name}", shorten(values), "one object for all layers")
    theta = rope.number("rope_theta", _Fields(config).number("rope_theta", 10000.0, low=1.0), low=1.0)
    kind = _read_rope_type(rope)
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind in ("linear", "dynamic"):
        return RopeConfig(theta=theta, type=kind, factor=rope.number("factor"))
    original = _Fields(config).integer(
        "original_max_position_embeddings",
        rope.integer("original_max_position_embeddings", max_positions),
    )
    if kind == "llama3":
        return _read_llama3(rope, theta, original)
    return _read_yarn(rope, theta, original, max_positions)


def _read_rope_type(rope: _Fields) -> RopeType:
    value = rope.get("rope_type") or rope.get("type") or "default"
    for kind in get_args(RopeType):
        if value == kind:
            return kind
    raise rope.error("rope_type", value, f"one of {', '.join(get_args(RopeType))}")


def _read_llama3(rope: _Fields, theta: float, original: int) -> RopeConfig:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise rope.error("high_freq_factor", high, f"above low_freq_factor={low:g}")
    return RopeConfig(
        theta=theta,
        type="llama3",
        factor=rope.number("factor"),
        original_max_position_embeddings=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _read_yarn(rope: _Fields, theta: float, original: int, max_positions: int) -> RopeConfig:
    if theta == 1.0:  # its logarithm is a divisor
        raise rope.error("rope_theta", theta, "above 1 with yarn")
    stretch = max_positions / original  # what transformers takes when the factor is null
    return RopeConfig(
        theta=theta,
        type="yarn",
        factor=rope.number("factor", stretch if "factor" in rope else None),
        original_max_position_embeddings=original,
        attention_factor=rope.optional_number("attention_factor"),
        beta_fast=rope.optional_number("beta_fast") or 32.0,
        beta_slow=rope.optional_number("beta_slow") or 1.0,
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.boolean("truncate", True),
    )
