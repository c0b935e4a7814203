"""What config.json and generation_config.json say beside the model: number format, ends, limits, presets.

Takes dicts, touches no file. The model is read by `families`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast, get_args

from ...ipc.errors import ConfigError, ModelError, SamplingParamsError
from ...ipc.params.param_fields import MAX_INT
from ...ipc.params.sampling_params import SamplingParams
from ...ipc.protocol.messages import MAX_EOS_TOKEN_IDS
from ...ipc.spec.model_spec import Dtype, ModelSpec

# What generation_config.json may preset, and SamplingParams' name for it.
_SAMPLING_KEYS = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
_SAMPLING_KEYS["max_new_tokens"] = "max_tokens"


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
    """End-of-sequence ids: generation_config.json's and config.json's. Raises ModelError for a bad value.

    What no output can hold ends none, in transformers too: -1, and ids beyond the vocabulary.
    """
    files = (("generation_config.json", generation_config), ("config.json", config))
    ids = dict.fromkeys(
        token_id
        for name, values in files
        for token_id in _read_token_ids(f"{name} eos_token_id", values.get("eos_token_id"))
        if 0 <= token_id < vocab_size
    )
    if len(ids) > MAX_EOS_TOKEN_IDS:  # each request carries them
        raise ModelError("config.json eos_token_id", f"{len(ids)} ids", f"at most {MAX_EOS_TOKEN_IDS}")
    return tuple(ids)


def _read_token_ids(field: str, value: Any) -> list[int]:
    ids: list[Any] = cast(list[Any], value) if isinstance(value, list) else [value]
    for token_id in ids:
        if token_id is not None and type(token_id) is not int:
            raise ModelError(field, value, "a token id, or a list of them")
    return [token_id for token_id in ids if token_id is not None]


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


def compute_max_model_len(spec: ModelSpec, requested: int | None, usual: int | None = None) -> int:
    """The longest sequence (prompt and output) of an engine, in tokens.

    `usual` is what the model was made for, if that is less than it can; it counts where nothing is requested.

    The model's own limit is max_position_embeddings, times the factor where rope scaling stretches it
    (linear, dynamic, yarn; llama3's already counts). A larger request raises ConfigError.
    """
    rope = spec.rope
    limit = spec.max_position_embeddings
    if rope.type == "yarn" and rope.original_max_position_embeddings is not None:
        limit = rope.original_max_position_embeddings
    if rope.type in ("linear", "dynamic", "yarn") and spec.is_causal:
        limit = int(min(limit * rope.factor, MAX_INT))
    if requested is None:
        return min(limit, usual or limit)
    if not isinstance(requested, int) or isinstance(requested, bool) or requested < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError("max_model_len", requested, f"an integer from 1 to {limit}, the model's limit")
    if requested > limit:
        raise ConfigError("max_model_len", requested, f"at most {limit}, the model's limit (config.json)")
    return requested
