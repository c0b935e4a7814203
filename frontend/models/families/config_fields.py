"""ConfigFields: typed reading of config.json that remembers which keys were asked for and judges the rest.

Checkpoints carry keys of their makers' tools, so an unknown key is no error. One whose name speaks of a part
of the computation, with a value that is not neutral, is: leaving it out could change every token in silence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

from ....ipc.errors import ModelError
from ....ipc.params.param_fields import MAX_INT

# What is computed from the settings of rope and norms is finite in float32 when they are within these.
_MIN_NUMBER, _MAX_NUMBER = 1e-20, 1e20
# Words of key names that speak of what is computed.
_ARITHMETIC = re.compile(
    r"(^|_)(act|activation|alibi|altup|attention|attn|bias|cap|capping|clip|conv|dense|dim|emb|embeddings?|experts?"
    r"|factor|ffn|gate|gating|heads?|hidden|laurel|layers?|layernorm|logits?|lora|mamba|mlp|moe|mrope|multiplier"
    r"|norm|parallel|qkv?|residual|rmsnorm|rope|rotary|router|scale|scaling|shared|sinks?|softcap|softcapping"
    r"|sparse|ssm|topk|window)(_|$)"
)
_SCALE = re.compile(
    r"(^|_)(scale|scaling|multiplier|factor|pct|ratio)(_|$)"
)  # of which 1 is the neutral value
# Of keys that have such a word and yet decide nothing here: training, other outputs, other implementations.
_HARMLESS = re.compile(
    r"_|output_|.*(drop|loss|jitter|initializer|implementation|flash|checkpoint|cross_attention)"
)


class ConfigFields:
    """One JSON object; `file` and `prefix` name it in errors."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "", file: str = "config.json") -> None:
        self._file = file
        self._values = values
        self._prefix = prefix
        self._known: set[str] = set()
        self._renamed: dict[str, str] = {}

    def __contains__(self, key: str) -> bool:
        return self._renamed.get(key, key) in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def rename(self, **names: str) -> None:
        """Look for keys under the names that a family has for them."""
        self._renamed.update(names)

    def ignore(self, *keys: str) -> None:
        """Count keys as known that decide nothing in this family."""
        self._known.update(keys)

    def get(self, key: str, default: object = None) -> Any:
        """The value as it is; absent or null: the default."""
        key = self._renamed.get(key, key)
        self._known.add(key)
        value = self._values.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None, low: int = 1, high: int = MAX_INT) -> int:
        """An integer from `low` to `high`; absent or null: the default."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.error(key, value, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, default: float | None = None, low: float = _MIN_NUMBER) -> float:
        """A number from `low` to _MAX_NUMBER; absent or null: the default."""
        value = self.get(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self.error(key, value, "a number")
        if not low <= value <= _MAX_NUMBER:  # also of an integer beyond the largest float, and of NaN
            raise self.error(key, value, f"a number from {low:g} to {_MAX_NUMBER:g}")
        return float(value)

    def optional_number(
        self, key: str, default: float | None = None, *, tests_truth: bool = True
    ) -> float | None:
        """As `number`, None for null, and for 0 where transformers `tests_truth`; absent: the default."""
        value = self.get(key)
        if key not in self:
            return default
        none = (None, 0) if tests_truth else (None,)
        return None if value in none and value is not False else self.number(key)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """A list of so many numbers, each as for `number`."""
        values: Any = self.get(key)
        if not isinstance(values, list) or len(cast(list[Any], values)) != count:
            shown = f"{len(cast(list[Any], values))} of them" if isinstance(values, list) else values
            raise self.error(key, shown, f"a list of {count} numbers")
        each = (ConfigFields({key: value}, self._prefix, self._file) for value in cast(list[Any], values))
        return tuple(fields.number(key) for fields in each)

    def boolean(self, key: str, default: bool) -> bool:
        """true or false; absent or null: the default."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, value, "true or false")
        return value

    def only(self, key: str, allowed: object) -> None:
        """Refuse any value but the one that is computed here; absent or null: that one."""
        if (value := self.get(key, allowed)) != allowed:
            raise self.error(key, value, "null" if allowed is None else f"{allowed!r}".lower())

    def error(self, key: str, value: object, allowed: str) -> ModelError:
        """What to raise for a value."""
        missing = " (it is missing)" if value is None else ""
        return self._error(self._renamed.get(key, key), value, f"{allowed}{missing}")

    def _error(self, stored_key: str, value: object, allowed: str) -> ModelError:
        return ModelError(f"{self._file} {self._prefix}{stored_key}", value, allowed)

    def check_rest(self, owner: str) -> None:
        """ModelError for the first key that nobody asked for and that seems to change arithmetic."""
        for key, value in self._values.items():
            if key not in self._known and _is_arithmetic(key) and not _is_neutral(key, value):
                raise self._error(key, value, f"absent: {owner} is computed without it here")


def _is_arithmetic(key: str) -> bool:
    return not _HARMLESS.match(key) and _ARITHMETIC.search(key.lower()) is not None


def _is_neutral(key: str, value: object) -> bool:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value == (1 if _SCALE.search(key.lower()) else 0)
    if isinstance(value, list):  # layer_types, of a family that has no other kind
        return all(kind == "full_attention" for kind in cast(list[Any], value))
    return not value
