"""The words that each command takes, asked of its parser; nothing is listed a second time."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..parser import describe

Run = Callable[[Sequence[str]], int]


@dataclass(frozen=True, slots=True)
class CommandWords:
    """Of one command: `commands` below it, or its options with the values to choose from, () for any."""

    commands: tuple[str, ...] = ()
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    switches: frozenset[str] = frozenset()  # options without a value


def read_command_words(commands: Mapping[str, Run]) -> dict[str, CommandWords]:
    """'serve', 'daemon', 'daemon start' ... -> its words; each command's `run` is asked and does nothing."""
    found: dict[str, CommandWords] = {}
    for name, run in commands.items():
        words = _ask(run, [])
        found[name] = words
        for below in words.commands:
            found[f"{name} {below}"] = _ask(run, [below])
    return found


def _ask(run: Run, argv: list[str]) -> CommandWords:
    found = describe(run, argv)
    return CommandWords(commands=found) if isinstance(found, tuple) else _read_parser(found.actions)


def _read_parser(actions: Mapping[str, argparse.Action]) -> CommandWords:
    shown = {
        flag: action
        for flag, action in actions.items()
        if flag.startswith("--") and action.help != argparse.SUPPRESS
    }
    return CommandWords(
        options={flag: tuple(map(str, action.choices or ())) for flag, action in shown.items()},
        switches=frozenset(flag for flag, action in shown.items() if action.nargs == 0),
    )
