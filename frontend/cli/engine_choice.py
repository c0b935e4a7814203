"""Which engine a command uses: one of its own, by the engine options, or with --attach a running daemon's."""

from __future__ import annotations

import argparse
from dataclasses import fields

from ...ipc.errors import ConfigError
from ..engine_args import EngineArgs
from ..models.model_folder import POCKET
from .parser import Parser

# --seed is the request's where a command has one; the others have defaults of the command.
_OF_COMMANDS = ("seed", "log_level", "generation_config", "scheduling_policy", "max_queued_bytes")


def add_engine_options(parser: Parser, takes_several: bool = False) -> None:
    """Add --attach and every engine option. takes_several: --attach may be repeated, and becomes a list."""
    text = "use the engine of a running daemon, which has its own engine options"
    if takes_several:
        text += "; repeated: several daemons' models behind one address"
    parser.add_argument("--attach", metavar="NAME", action="append" if takes_several else "store", help=text)
    EngineArgs.add_cli_args(parser)


def read_engine_choice(options: argparse.Namespace, model: str = POCKET) -> EngineArgs | None:
    """The engine's arguments, or None with --attach. ConfigError for engine options beside it.

    model: the command's default.
    """
    if options.attach is None:
        return EngineArgs.from_cli_args(options)
    for item in fields(EngineArgs):
        if item.name in _OF_COMMANDS:
            continue
        default = model if item.name == "model" else item.default
        value = getattr(options, item.name, default)
        if value != default:
            raise ConfigError(item.name, value, "not given with --attach: the daemon's engine has its own")
    return None
