"""docs/options.md: the options of every command, from the parsers that read them."""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from ...frontend.cli import entry
from ...frontend.cli.parser import Parser, describe
from ...frontend.options.engine_args import EngineArgs
from ..markdown import format_table

_ENGINE_NAMES = {item.name for item in fields(EngineArgs)}
_HEAD = ("option", "default", "meaning")
_SHOWN_DEFAULT = re.compile(r" \((?:default: )?%\(default\)s\)")


def render_engine_options() -> str:
    """A table for each group of engine options."""
    parser = Parser("engine", "")
    EngineArgs.add_cli_args(parser)
    groups = [group for group in _list_groups(parser) if _list_actions(group)]
    return "\n".join(
        f"### {_name_group(group)}\n\n{_render_actions(_list_actions(group))}" for group in groups
    )


def render_commands() -> str:
    """A section for each command."""
    return "\n".join(text for name in entry.COMMANDS for text in _render_command([name]))


def _render_command(words: list[str]) -> list[str]:
    """The section of a command, or of each of its subcommands."""
    module = importlib.import_module(entry.COMMANDS[words[0]].module, f"{entry.__package__}.commands")
    parsed = describe(module.run, words[1:])
    if isinstance(parsed, tuple):
        return [text for word in parsed for text in _render_command([*words, word])]
    return list(_render_parser(parsed))


def _render_parser(parser: Parser) -> Iterator[str]:
    yield f"## {parser.prog}\n"
    usage = parser.usage or ""
    yield f"{parser.description}\n\n`{usage}`\n"
    actions = [action for group in _list_groups(parser) for action in _list_actions(group)]
    takes_engine = len(_ENGINE_NAMES & {action.dest for action in actions}) > len(_ENGINE_NAMES) / 2
    shown = [action for action in actions if not (takes_engine and action.dest in _ENGINE_NAMES)]
    if shown:
        yield _render_actions(shown)
    if takes_engine:
        changed = {
            item.name: parser.get_default(item.name)
            for item in fields(EngineArgs)
            if parser.get_default(item.name) != item.default
        }
        listed = ", ".join(
            f"`--{name.replace('_', '-')}` {'none' if value in (None, '') else value}"
            for name, value in changed.items()
        )
        yield f"And all engine options{'; defaults that differ: ' if listed else ''}{listed}.\n"


def _list_groups(parser: Parser) -> list[Any]:
    return parser._action_groups  # pyright: ignore[reportPrivateUsage]  # argparse shows them nowhere else


def _name_group(group: Any) -> str:
    return str(group.title).removesuffix(" options").capitalize()


def _list_actions(group: Any) -> list[argparse.Action]:
    """Those with a name that a person would type."""
    return [
        action
        for action in group._group_actions
        if action.help != argparse.SUPPRESS
        and action.dest != "help"
        and (action.option_strings or action.dest not in _ENGINE_NAMES)
    ]


def _render_actions(actions: Iterable[argparse.Action]) -> str:
    return format_table(
        _HEAD, ((_name(action), _tell_default(action), _tell_meaning(action)) for action in actions)
    )


def _name(action: argparse.Action) -> str:
    metavar = str(action.metavar or action.dest.upper())
    if not action.option_strings:
        return f"`{metavar}`"
    takes_value = action.nargs != 0 and not action.choices
    value = f" {metavar}" if takes_value else ""
    return ", ".join(f"`{flag}{value}`" for flag in action.option_strings)


def _tell_default(action: argparse.Action) -> str:
    value = action.default
    if value is None or value is False or value in ("", [], argparse.SUPPRESS) or not action.option_strings:
        return ""
    if value is True:
        return "on"
    if isinstance(value, Path) and value.is_absolute():
        return "this user's cache"
    return f"`{' '.join(map(str, value)) if isinstance(value, (list, tuple)) else value}`"


def _tell_meaning(action: argparse.Action) -> str:
    text = _SHOWN_DEFAULT.sub("", action.help or "").replace("%%", "%")
    default = f" ({action.default})"
    text = text.removesuffix(default) if _tell_default(action) else text
    choices = ", ".join(f"`{choice}`" for choice in dict.fromkeys(action.choices or ()))
    return f"{text}{'; ' if text and choices else ''}{'one of ' if choices else ''}{choices}"
