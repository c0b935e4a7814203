"""--config FILE.yaml: options of a command in a file, as the words that the command line would have.

What the command line says wins. Only who gives the option loads PyYAML.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from ...ipc.errors import ConfigError, did_you_mean

FLAG = "--config"
_MAX_BYTES = 1 << 18  # PyYAML reads 100 KB a second
_Actions = Mapping[str, argparse.Action]


def add_config_option(parser: argparse.ArgumentParser) -> None:
    """Have `Parser.parse` take the option."""
    text = "a YAML file of these options, by their names; the command line's win"
    parser.add_argument(FLAG, metavar="FILE", help=text)


def expand_config(actions: _Actions, words: Sequence[str]) -> list[str]:
    """`words` with a file's options before them, but for those that are in `words`.

    `actions`: the command's, by flag. Raises ConfigError for a file that cannot be used.
    """
    paths = [path for path in _find_values(words) if path]
    if not paths:
        return list(words)
    if len(paths) > 1:
        raise ConfigError("config", ", ".join(paths), "one file")
    given = {id(actions[flag]) for flag in (word.partition("=")[0] for word in words) if flag in actions}
    found: list[str] = []
    for name, value in _read_options(paths[0]).items():
        flag = f"--{name.replace('_', '-')}"
        if flag not in actions or flag in (FLAG, "--help"):
            hint = did_you_mean(flag, actions)
            raise ConfigError(f"config {paths[0]} {name}", value, f"an option of this command{hint}")
        if id(actions[flag]) not in given and value is not None:
            found += _make_words(f"{paths[0]} {name}", flag, actions[flag], value)
    return [*found, *words]


def _find_values(words: Sequence[str]) -> Iterable[str]:
    for place, word in enumerate(words):
        if word == FLAG:
            yield words[place + 1] if place + 1 < len(words) else ""
        elif word.startswith(f"{FLAG}="):
            yield word.removeprefix(f"{FLAG}=")


def _read_options(path: str) -> dict[str, Any]:
    import yaml

    try:
        with Path(path).open("rb") as file:
            text = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError("config", path, f"a file that can be read ({error.strerror})") from None
    if len(text) > _MAX_BYTES:
        raise ConfigError("config", path, f"a file of at most {_MAX_BYTES} bytes")
    try:
        # A few lines of aliases stand for more values than any memory holds.
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
            raise yaml.YAMLError("an alias, such as *name, which is not taken here")
        options: object = yaml.safe_load(text)
    # PyYAML raises the others for a value that is not of its tag, and for a date that there is not.
    except (
        yaml.YAMLError,
        RecursionError,
        ValueError,
        LookupError,
        AttributeError,
        ArithmeticError,
    ) as error:
        raise ConfigError("config", path, f"YAML ({' '.join(str(error).split())})") from None
    if not isinstance(options, dict) or not all(isinstance(name, str) for name in cast(Any, options)):
        raise ConfigError("config", path, "a mapping of options' names to values, as in 'port: 8000'")
    return cast(dict[str, Any], options)


def _make_words(place: str, flag: str, action: argparse.Action, value: Any) -> list[str]:
    is_switch = action.nargs == 0
    if is_switch != isinstance(value, bool):
        raise ConfigError(f"config {place}", value, "true or false" if is_switch else "a text or a number")
    if is_switch:
        negated = f"--no-{flag.removeprefix('--')}"
        return [flag] if value else [word for word in action.option_strings if word == negated]
    if isinstance(value, list) and _takes_several(action):
        return [f"{flag}={_as_word(place, one)}" for one in cast(list[Any], value)]
    return [f"{flag}={_as_word(place, value)}"]


def _takes_several(action: argparse.Action) -> bool:
    return isinstance(action, argparse._AppendAction)  # pyright: ignore[reportPrivateUsage]


def _as_word(place: str, value: object) -> str:
    """As one would type it; an object or a list as JSON, which options that take one read."""
    try:
        word = json.dumps(value) if isinstance(value, (dict, list)) else str(value)
        if b"\0" in os.fsencode(word):
            raise ValueError("a zero, which no command line has")
        return word
    except (TypeError, ValueError) as error:  # a date or a set in an object; an integer of 10,000 digits
        raise ConfigError(f"config {place}", type(value).__name__, f"plain values ({error})") from None
