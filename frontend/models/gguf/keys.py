"""A GGUF file's metadata below its architecture's name; one that nothing here knows is refused by name."""

from __future__ import annotations

from typing import Any, cast

from ..families.config_fields import ConfigFields
from .header import GgufHeader

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
    "nextn_predict_layers",
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
}
BY_LAYER = ("attention.head_count_kv", "feed_forward_length")  # of Gemma 4, whose layers differ


class Keys(ConfigFields):
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
        for key in BY_LAYER if architecture == "gemma4" else ():
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
