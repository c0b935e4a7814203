"""What readers of a quantization_config share: strict keys, sizes of groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ....ipc.errors import ModelError
from ....ipc.spec.linear_shapes import LinearShape
from ....ipc.spec.weight_format import WeightFormat
from ..families.config_fields import ConfigFields

# The format of a layer, None for the model's type. ModelError where its shape does not go with the format.
FormatRule = Callable[[LinearShape], WeightFormat | None]

_MAX_GROUP = 1 << 20
MAX_MATCHING_S = 20.0  # of computing, for all patterns of a config and all layers; it takes milliseconds


class MatchingTime:
    """What matching names of layers with the patterns of one config may still take."""

    def __init__(self) -> None:
        self.left_s = MAX_MATCHING_S


class QuantizationFields(ConfigFields):
    """A quantization_config or an object in it, of which every key must be known or have no value."""

    def __init__(
        self,
        values: dict[str, Any],
        prefix: str = "quantization_config.",
        matching_time: MatchingTime | None = None,
    ) -> None:
        super().__init__(values, prefix)
        self.matching_time = matching_time or MatchingTime()
        self._values, self._prefix = values, prefix

    def object(self, key: str) -> QuantizationFields:
        """The object at a key; absent or null: an empty one."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise self.error(key, value, "an object")
        prefix = f"{self._prefix}{key}."
        return QuantizationFields(value, prefix, self.matching_time)  # pyright: ignore[reportUnknownArgumentType]

    def choice(self, key: str, allowed: Iterable[Any], default: object = None) -> Any:
        """One of the allowed values, a text in lower case; absent or null: the default."""
        value = self.get(key, default)
        value = value.lower() if isinstance(value, str) else value
        known = list(allowed)
        if not any(value == each and type(value) is type(each) for each in known):
            raise self.error(key, value, f"one of {', '.join(map(str, known))}")
        return value

    def group_size(self, key: str, default: int | None = None) -> int:
        """Inputs of a group, 0 for -1: all of them."""
        if self.get(key) == -1:
            return 0
        size = self.integer(key, default, high=_MAX_GROUP)
        if size % 16:
            raise self.error(key, size, "-1 or a multiple of 16")
        return size

    def check_keys(self, *harmless: str) -> None:
        """ModelError for the first key that nobody asked for, has a value, and is not `harmless`."""
        for key, value in self._values.items():
            if key not in self._known and key not in harmless and value not in (None, False, {}, [], ""):
                raise self.error(key, value, "absent: what it changes is not known here")

    def refuse(self, key: str, *neutral: object) -> None:
        """ModelError for a value that is neither null, false, empty nor one of `neutral`."""
        value = self.get(key)
        if value and value not in neutral:
            raise self.error(key, value, f"{neutral[0] if neutral else 'null'}: nothing here computes it")


def check_multiple(linear: LinearShape, dimension: str, size: int, divisor: int) -> None:
    """ModelError unless a dimension of the layer is a multiple of what its format packs together."""
    if size % divisor:
        raise ModelError(f"{linear.name} {dimension}", size, f"a multiple of {divisor} in its format")
