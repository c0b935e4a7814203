"""How fields of a quantization_config are read, and which layers a list of names or patterns in it means.

Patterns are anybody's: short, of a kind whose cost does not grow exponentially with a name's length, and
refused when all of a config take too long.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from typing import Any, cast

from ....ipc.errors import ModelError
from ....ipc.spec.linear_shapes import LinearShape
from ....ipc.spec.weight_format import WeightFormat
from ..families.config_fields import ConfigFields

# What readers of a quantization_config share: strict keys, sizes of groups.

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


Rule = Callable[[str], bool]

MAX_NAMES = 100_000  # a list of the experts of a large model, written out
MAX_PATTERN_LENGTH = 300
MAX_PATTERNS = 1000
_MAX_REPEATS = 4  # beside those of digits: 60 characters are cut into five parts in 500,000 ways
_MAX_CHOICES = 1024  # ways through the groups of alternatives, which multiply
_ESCAPED = re.compile(r"\\[^d]", re.DOTALL)
_CLASS = re.compile(r"\[\^?\]?[^\]]*\]")
_REPEAT = re.compile(r"(?<!\\d)(?<![(*+}])[*+?{]")
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_VERBOSE = re.compile(r"\(\?[a-zA-Z-]*x")  # under which a space may stand between a group and its repeat
_SPECIAL = re.compile(r"[*+?\[\](){}|^$\\]")


def read_names(fields: QuantizationFields, *keys: str) -> list[str] | None:
    """The list of texts of the first key that is there; None where all are absent or null."""
    for key in keys:
        value = fields.get(key)
        if value is None:
            continue
        names = cast(list[Any], value) if isinstance(value, list) else []
        if not isinstance(value, list) or not all(isinstance(name, str) for name in names):
            raise fields.error(key, value, "a list of names of layers")
        if len(names) > MAX_NAMES:
            raise fields.error(key, f"{len(names)} names", f"at most {MAX_NAMES}")
        return names
    return None


class NamePattern:
    """A regular expression. Whoever matches with those of one `MatchingTime` is stopped where it ends."""

    def __init__(self, pattern: re.Pattern[str], left: MatchingTime, error: ModelError) -> None:
        self.text = pattern.pattern
        self._pattern = pattern
        self._left = left
        self._error = error

    def match(self, name: str) -> bool:
        """Whether it matches from the start on; ModelError when the time is over."""
        start = time.thread_time()
        is_match = self._pattern.match(name) is not None
        self._left.left_s -= time.thread_time() - start
        if self._left.left_s < 0:
            raise self._error
        return is_match


def compile_pattern(fields: QuantizationFields, key: str, pattern: str) -> NamePattern:
    """A regular expression; ModelError for one that is wrong or may take for ever."""
    if len(pattern) > MAX_PATTERN_LENGTH:
        raise fields.error(key, pattern[:80] + "...", f"patterns of at most {MAX_PATTERN_LENGTH} characters")
    plain = _CLASS.sub("_", _ESCAPED.sub("_", pattern))
    if _REPEATED_GROUP.search(plain) or _VERBOSE.search(plain) or len(_REPEAT.findall(plain)) > _MAX_REPEATS:
        allowed = f"patterns with no group repeated, at most {_MAX_REPEATS} repeats, and no flag x"
        raise fields.error(key, pattern, allowed)
    if _count_choices(plain) > _MAX_CHOICES:
        allowed = f"patterns whose alternatives are combined in at most {_MAX_CHOICES} ways"
        raise fields.error(key, pattern, allowed)
    try:
        compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise fields.error(key, pattern, f"a regular expression ({error})") from None
    slow = fields.error(key, pattern, f"patterns that take less than {MAX_MATCHING_S:g} s for all layers")
    return NamePattern(compiled, fields.matching_time, slow)


def _count_choices(plain: str) -> int:
    """The product of the numbers of alternatives in all groups, an upper bound of the ways through them."""
    product, open_groups = 1, [1]
    for character in plain:
        if character == "(":
            open_groups.append(1)
        elif character == "|":
            open_groups[-1] += 1
        elif character == ")" and len(open_groups) > 1:
            product *= open_groups.pop()
    return product


def compile_patterns(fields: QuantizationFields, key: str, texts: list[str]) -> list[NamePattern]:
    """The patterns of a list, at most MAX_PATTERNS."""
    if len(texts) > MAX_PATTERNS:
        raise fields.error(key, f"{len(texts)} patterns", f"at most {MAX_PATTERNS}")
    return [compile_pattern(fields, key, text) for text in texts]


def match_parts(fields: QuantizationFields, key: str, names: list[str], from_start: bool = False) -> Rule:
    """Layers that a name holds or ends: "mlp.gate" means "layers.0.mlp.gate", not "layers.0.mlp.gate_proj".

    A name with a regular expression's signs matches from the start to the end of a part (transformers' rule);
    with `from_start` any name does.
    """
    literal = {name.strip(".") for name in names if not _SPECIAL.search(name)}
    special = [rf"(?:{name})(?:\.|$)" for name in names if _SPECIAL.search(name)]
    patterns = compile_patterns(fields, key, special)

    def is_one(layer: str) -> bool:
        parts = layer.split(".")
        starts = range(1 if from_start else len(parts))
        spans = (".".join(parts[a:b]) for a in starts for b in range(a + 1, len(parts) + 1))
        return any(span in literal for span in spans) or any(p.match(layer) for p in patterns)

    return is_one


def match_text(fields: QuantizationFields, key: str, names: list[str]) -> Rule:
    """Layers whose name contains one of the texts (AutoAWQ's rule)."""
    if len(names) > MAX_PATTERNS:
        raise fields.error(key, f"{len(names)} names", f"at most {MAX_PATTERNS}")
    return lambda layer: any(name in layer for name in names)


def all_but(
    is_left_out: Rule, weight_format: WeightFormat, check: Callable[[LinearShape], None] | None = None
) -> FormatRule:
    """Every layer has the format but those left out; `check` raises for a shape that does not go with it."""

    def find(linear: LinearShape) -> WeightFormat | None:
        if is_left_out(linear.name):
            return None
        if check is not None:
            check(linear)
        return weight_format

    return find
