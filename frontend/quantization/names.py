"""Which layers a list of names or patterns in a quantization_config means.

Patterns are anybody's: short, and of a kind whose cost does not grow exponentially with a name's length.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, cast

from ..families.config_fields import ConfigFields

Rule = Callable[[str], bool]

MAX_NAMES = 100_000  # a list of the experts of a large model, written out
MAX_PATTERN_LENGTH = 300
MAX_PATTERNS = 1000
_MAX_REPEATS = 4  # beside those of digits: 60 characters are cut into five parts in 500,000 ways
_REPEAT = re.compile(r"(?<!\\)(?<!\\d)(?<![(*+}])[*+?{]")
_REPEATED_GROUP = re.compile(r"(?<!\\)\)[*+{]")
_SPECIAL = re.compile(r"[*+?\[\](){}|^$\\]")


def read_names(fields: ConfigFields, *keys: str) -> list[str] | None:
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


def compile_pattern(fields: ConfigFields, key: str, pattern: str) -> re.Pattern[str]:
    """A regular expression; ModelError for one that is wrong or may take for ever."""
    if len(pattern) > MAX_PATTERN_LENGTH:
        raise fields.error(key, pattern[:80] + "...", f"patterns of at most {MAX_PATTERN_LENGTH} characters")
    if _REPEATED_GROUP.search(pattern) or len(_REPEAT.findall(pattern)) > _MAX_REPEATS:
        raise fields.error(
            key, pattern, f"patterns with no group repeated and at most {_MAX_REPEATS} repeats"
        )
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise fields.error(key, pattern, f"a regular expression ({error})") from None


def compile_patterns(fields: ConfigFields, key: str, texts: list[str]) -> list[re.Pattern[str]]:
    """Those of a list, at most MAX_PATTERNS."""
    if len(texts) > MAX_PATTERNS:
        raise fields.error(key, f"{len(texts)} patterns", f"at most {MAX_PATTERNS}")
    return [compile_pattern(fields, key, text) for text in texts]


def match_parts(fields: ConfigFields, key: str, names: list[str]) -> Rule:
    """Layers that a name holds or ends: "mlp.gate" means "layers.0.mlp.gate", not "layers.0.mlp.gate_proj".

    A name with a regular expression's signs matches from the start to the end of a part (transformers' rule).
    """
    literal = {name.strip(".") for name in names if not _SPECIAL.search(name)}
    special = [rf"(?:{name})(?:\.|$)" for name in names if _SPECIAL.search(name)]
    patterns = compile_patterns(fields, key, special)

    def is_one(layer: str) -> bool:
        parts = layer.split(".")
        spans = (".".join(parts[a:b]) for a in range(len(parts)) for b in range(a + 1, len(parts) + 1))
        return any(span in literal for span in spans) or any(p.match(layer) for p in patterns)

    return is_one


def match_text(fields: ConfigFields, key: str, names: list[str]) -> Rule:
    """Layers whose name contains one of the texts (AutoAWQ's rule)."""
    if len(names) > MAX_PATTERNS:
        raise fields.error(key, f"{len(names)} names", f"at most {MAX_PATTERNS}")
    return lambda layer: any(name in layer for name in names)
