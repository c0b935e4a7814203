"""Which engine a command uses: one of its own, by the engine options, or with --attach a running daemon's."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import fields

from ...ipc.daemon.run_dir import list_daemons
from ...ipc.errors import ConfigError, DaemonError
from ...ipc.network.tcp_address import is_tcp
from ..client.remote_daemon import Attachment, check_unattached, choose_attachment
from ..models.model_files import POCKET
from ..options.engine_args import EngineArgs
from .parser import Parser

# --seed is the request's where a command has one; the others have defaults of the command.
_OF_COMMANDS = (
    "seed",
    "log_level",
    "log_format",
    "generation_config",
    "scheduling_policy",
    "max_queued_bytes",
)


def add_engine_options(parser: Parser, takes_several: bool = False) -> None:
    """Add --attach and every engine option. takes_several: --attach may be repeated, and becomes a list."""
    text = "use the engine of a running daemon, which has its own engine options"
    if takes_several:
        text += "; repeated: several daemons' models behind one address"
    parser.add_argument("--attach", metavar="NAME", action="append" if takes_several else "store", help=text)
    add_keys_option(parser)
    EngineArgs.add_cli_args(parser)


def add_keys_option(parser: Parser) -> None:
    """Add --keys, which `check_unattached` refuses without --attach."""
    text = "folder of this client's keys, for --attach tcp://HOST:PORT (see `quire keys`)"
    parser.add_argument("--keys", metavar="DIR", help=text)


def read_engine_choice(options: argparse.Namespace, model: str = POCKET) -> EngineArgs | None:
    """The engine's arguments, or None with --attach. ConfigError for engine options beside it.

    model: the command's default.
    """
    if options.attach is None:
        check_unattached(keys=options.keys)
        return EngineArgs.from_cli_args(options)
    files = ("model", "tokenizer") if _is_remote(options.attach) else ()
    for item in fields(EngineArgs):
        if item.name in (*_OF_COMMANDS, *files):
            continue
        default = model if item.name == "model" else item.default
        value = getattr(options, item.name, default)
        if value != default:
            raise ConfigError(item.name, value, "not given with --attach: the daemon's engine has its own")
    if files:
        options.attach = _choose_remote(options, options.model)
    return None


def choose_model(argv: Sequence[str], argument: str | None, model: str) -> str:
    """The model of a command that takes it as an argument and as --model, and from a config file.

    `model`: what the options say, the default included. Raises ConfigError for two models in `argv`.
    """
    models = [] if argument is None else [argument]
    for word, after in itertools.pairwise([*argv, ""]):
        models += [after] if word == "--model" else []
        models += [word.removeprefix("--model=")] if word.startswith("--model=") else []
    models = list(dict.fromkeys(models))
    if len(models) > 1:
        allowed = (
            "one model; of several each needs a `quire daemon start`, and `quire serve --attach` has them"
        )
        raise ConfigError("model", ", ".join(models), allowed)
    return models[0] if models else model


def check_names_end(argv: Sequence[str], names: Sequence[str] | None, argument: str | None) -> None:
    """Raise ConfigError where a model may have been taken for the last of several served names."""
    flags = {word.partition("=")[0] for word in argv}
    if len(names or ()) > 1 and argument is None and flags.isdisjoint(("--model", "--config")):
        allowed = "a model beside it, the first argument or --model: the last of them may be meant as one"
        raise ConfigError("served_model_name", " ".join(names or ()), allowed)


def choose_daemons(names: Sequence[str], keys: str | None) -> list[Attachment]:
    """Daemons only to look at, without names all that run. Raises ConfigError, and DaemonError for none."""
    if not any(map(is_tcp, names)):
        check_unattached(keys=keys)
    names = names or list_daemons()
    if not names:
        raise DaemonError("no daemon runs; `quire daemon start` starts one")
    return [choose_attachment(name, keys if is_tcp(name) else None, looks_only=True) for name in names]


def _is_remote(attach: str | list[str]) -> bool:
    return any(map(is_tcp, [attach] if isinstance(attach, str) else attach))


def _choose_remote(options: argparse.Namespace, model: str) -> Attachment | list[Attachment]:
    """A daemon of another machine; of several some may be of this one, and one model has copies here."""
    if isinstance(options.attach, str):
        return choose_attachment(options.attach, options.keys, model, options.tokenizer)
    return [
        choose_attachment(name, options.keys, model, options.tokenizer) if is_tcp(name) else name
        for name in options.attach
    ]
