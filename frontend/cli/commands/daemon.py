"""`quire daemon`: engines in the background that frontends attach to and leave."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from ....ipc.daemon.daemon_state import forget_failure, read_state
from ....ipc.daemon.run_dir import find_named, find_owner
from ....ipc.errors import InputError
from ....ipc.network.tcp_address import check_listening, parse_tcp_address
from ...daemon import (
    add_engine,
    check_name_is_free,
    drain_engine,
    find_log,
    remove_engine,
    restart_engine,
    resume_engine,
    start_daemon,
    stop_daemon,
)
from ...daemon_record import forget_record
from ...options.engine_args import SHARED_MAX_QUEUED_BYTES, EngineArgs
from ..engine_choice import choose_model
from ..parser import ExitCode, Parser, UsageError, add_config_option, run_subcommand
from ..streams import PhaseLine

DEFAULT_NAME = "default"
_NUM_LOG_LINES = 100
_FOLLOW_PERIOD_S = 0.25

_USAGE = """\
usage: quire daemon COMMAND [OPTIONS]

An engine in the background, to which any number of frontends attach.

commands:
  start [MODEL]   start one and return when it is ready; takes the engine options
  stop [NAME]     end one
  restart [NAME]  restart its engine; attached clients wait, and their requests go on. If files of the model
                  or of Quire have changed, it is started anew as it was started, and requests end
  logs [NAME]     print the last lines of its log; -f goes on

of a daemon with several engines (start --engines N), whose numbers `quire ps` shows:
  restart [NAME]               one after the other: each one's requests go on at another meanwhile
  drain [NAME] ENGINE          move its requests elsewhere, and give it nothing new
  resume [NAME] ENGINE         give it requests again
  add-engine [NAME]            start one more
  remove-engine [NAME] ENGINE  drain it, then end it

`quire ps` lists those that run. A NAME that is not given is 'default'.
Afterwards: quire generate --attach NAME "Once upon a time", LLM(attach="NAME"), quire serve --attach NAME.
"""
_CHUNK = 65_536  # characters


def run(argv: Sequence[str]) -> int:
    """Run `quire daemon`."""
    return run_subcommand("quire daemon", _USAGE, _COMMANDS, argv)


def _start(argv: Sequence[str]) -> int:
    parser = Parser("quire daemon start", "Start an engine in the background.", arguments=" [MODEL]")
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", help="as --model")
    parser.add_argument("--name", default=DEFAULT_NAME, help=f"what to call it ({DEFAULT_NAME!r})")
    text = "where frontends of other machines come, tcp://HOST:PORT; only with --keys (nowhere)"
    parser.add_argument("--listen", metavar="ADDRESS", help=text)
    text = "folder of the keys for --listen; `quire keys make DIR` makes one"
    parser.add_argument("--keys", metavar="DIR", help=text)
    add_config_option(parser)
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(scheduling_policy="fair", max_queued_bytes=SHARED_MAX_QUEUED_BYTES)
    options = parser.parse(argv)
    options.model = choose_model(argv, options.model_argument, options.model)
    check_name_is_free(options.name)
    check_listening(options.listen, options.keys)
    args = EngineArgs.from_cli_args(options)
    config = args.create_engine_config()
    with PhaseLine(f"daemon {options.name!r}") as line:
        pid = start_daemon(
            options.name,
            config,
            line.show,
            listen=options.listen,
            keys=options.keys,
            engine_args=asdict(args),
        )
    print(
        f"{options.name}: {config.model.served_model_name} is ready (pid {pid}), log {find_log(options.name)}"
    )
    state = read_state(find_named(options.name))
    if state is not None and state.listen:
        print(f"{options.name}: frontends of other machines come to {state.listen}")
    return ExitCode.OK


def _stop(argv: Sequence[str]) -> int:
    name = _parse_name("stop", "End a daemon, its engine and its workers.", argv)
    forget_failure(name)
    stop_daemon(name)
    forget_record(name)
    print(f"{name}: stopped")
    return ExitCode.OK


def _restart(argv: Sequence[str]) -> int:
    parser = _make_name_parser("restart", "Restart a daemon's engines; requests that run go on.")
    parser.add_argument("--engine", type=int, metavar="N", help="only this one of several")
    options = parser.parse(argv)
    name = _choose_name(options)
    restart_engine(name, index=options.engine)
    print(f"{name}: ready again")
    return ExitCode.OK


def _drain(argv: Sequence[str]) -> int:
    name, index = _parse_engine("drain", "Move an engine's requests to others; it gets nothing new.", argv)
    drain_engine(name, index)
    print(f"{name}: engine {index} is drained")
    return ExitCode.OK


def _resume(argv: Sequence[str]) -> int:
    name, index = _parse_engine("resume", "Give an engine that was drained requests again.", argv)
    resume_engine(name, index)
    print(f"{name}: engine {index} takes requests")
    return ExitCode.OK


def _add_engine(argv: Sequence[str]) -> int:
    name = _parse_name("add-engine", "Start one more engine in a daemon.", argv)
    print(f"{name}: engine {add_engine(name)} is ready")
    return ExitCode.OK


def _remove_engine(argv: Sequence[str]) -> int:
    name, index = _parse_engine("remove-engine", "Drain an engine of a daemon, then end it.", argv)
    remove_engine(name, index)
    print(f"{name}: engine {index} is removed")
    state = read_state(find_named(name))
    if state is not None and state.listen:
        first = parse_tcp_address("listen", state.listen)
        left = [engine.index for engine in state.engines if engine.index != index and engine.state != "lost"]
        places = ", ".join(str(first.shift(number)) for number in left)
        print(f"{name}: frontends of other machines come no longer to {first.shift(index)}, but to {places}")
    return ExitCode.OK


def _logs(argv: Sequence[str]) -> int:
    parser = _make_name_parser("logs", "Print the last lines of a daemon's log, also when it has ended.")
    parser.add_argument("-n", "--lines", type=int, default=_NUM_LOG_LINES, help="how many (%(default)s)")
    text = "go on as it is written, until the daemon ends or Ctrl-C"
    parser.add_argument("-f", "--follow", action="store_true", help=text)
    options = parser.parse(argv)
    if options.lines < 1:
        raise UsageError(f"lines={options.lines}: expected an integer from 1")
    name = _choose_name(options)
    path = find_log(name)
    try:
        with path.open(encoding="utf-8", errors="replace") as log:
            sys.stdout.writelines(deque(log, maxlen=options.lines))
            if options.follow:
                _follow(log, find_named(name))
    except FileNotFoundError:
        raise InputError("name", name, f"a daemon that has logged something (no file {path})") from None
    return ExitCode.OK


def _follow(log: TextIO, directory: Path) -> None:
    def is_running() -> bool:
        return find_owner(directory) is not None

    sys.stdout.flush()
    for text in follow_log(log, is_running, lambda: time.sleep(_FOLLOW_PERIOD_S)):
        sys.stdout.write(text)
        sys.stdout.flush()


def _make_name_parser(command: str, description: str, more: str = "") -> Parser:
    parser = Parser(f"quire daemon {command}", description, arguments=f" [NAME]{more}")
    # While the options are parsed argparse takes a positional's default away, so no %(default)s in its help.
    parser.add_argument(
        "name", nargs="?", default=DEFAULT_NAME, metavar="NAME", help=f"which one ({DEFAULT_NAME!r})"
    )
    parser.add_argument("--name", dest="name_option", metavar="NAME", help="the same, as `start` takes it")
    return parser


def _parse_name(command: str, description: str, argv: Sequence[str]) -> str:
    return _choose_name(_make_name_parser(command, description).parse(argv))


def _parse_engine(command: str, description: str, argv: Sequence[str]) -> tuple[str, int]:
    parser = _make_name_parser(command, description, " ENGINE")
    parser.add_argument("engine", type=int, metavar="ENGINE", help="its number, as `quire ps` shows it")
    options = parser.parse(argv)
    return _choose_name(options), options.engine


def _choose_name(options: Namespace) -> str:
    """'' too: a script whose variable is empty does not mean the default."""
    return options.name if options.name_option is None else options.name_option


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "start": _start,
    "stop": _stop,
    "restart": _restart,
    "logs": _logs,
    "drain": _drain,
    "resume": _resume,
    "add-engine": _add_engine,
    "remove-engine": _remove_engine,
}


def follow_log(log: TextIO, is_running: Callable[[], bool], wait: Callable[[], None]) -> Iterator[str]:
    """What comes after where `log` stands, until its writer has ended and all of it has been read.

    wait: called whenever there is no more for the moment.
    """
    while True:
        runs = is_running()  # asked first: what is written before the end is read after it
        while text := log.read(_CHUNK):
            yield text
        if not runs:
            return
        wait()
