"""vLLM's engine arguments that scripts and command lines carry along for what Quire does not have.

The values that leave it off are taken and dropped, so that a script runs unchanged; of another is said what
Quire lacks, or has instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ...ipc.errors import ConfigError
from ...ipc.params.absent_arguments import drop_absent, read_rows

# By what there is to say of them, each with the values that leave it off.
_ROWS: dict[str, str] = msgspec.json.decode(Path(__file__).with_suffix(".json").read_bytes())
ENGINE_ARGUMENTS = read_rows(_ROWS)


class DropsOffValues(type):
    """A class whose keyword arguments are dropped where they leave off what Quire does not have."""

    if not TYPE_CHECKING:  # a type checker goes by the class' own fields

        def __call__(cls, *args: Any, **values: Any) -> Any:
            return super().__call__(*args, **drop_off_values(values))


def drop_off_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without those that ask for nothing. Raises ConfigError for one that asks for what is not here."""
    return drop_absent(values, ENGINE_ARGUMENTS, ConfigError)


def drop_off_options(words: Sequence[str], known: Mapping[str, Any]) -> list[str]:
    """As `drop_off_values`, of a command line's words before '--'; `known` options stay."""
    kept: list[str] = []
    rest = list(words)
    while rest and rest[0] != "--":
        word = rest.pop(0)
        flag, has_value, text = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        is_negated = name not in ENGINE_ARGUMENTS and name.startswith("no_")
        name = name.removeprefix("no_") if is_negated else name
        if flag in known or not flag.startswith("--") or name not in ENGINE_ARGUMENTS:
            kept.append(word)
            continue
        value: Any = not is_negated
        if has_value:
            value = _read_word(text)
        elif not any(isinstance(off, bool) for off in ENGINE_ARGUMENTS[name].off) and rest:
            value = _read_word(rest.pop(0))
        drop_off_values({name: value})
    return [*kept, *rest]


def _read_word(text: str) -> Any:
    """A value of a command line: JSON, as numbers and objects are, or else text."""
    try:
        return msgspec.json.decode(text.lower() if text in ("None", "True", "False") else text)
    except msgspec.DecodeError:
        return None if text.lower() == "none" else text
