"""Chooses the subcommand and turns every way to end into one line and an exit code.

Knows the commands by name only, so that `quire --help` loads none of them.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from ...ipc.errors import InputError, QuireError, did_you_mean, make_printable
from ...ipc.processes.collector import paused_collector
from ...ipc.processes.process_limits import discard_unwritable, open_closed_streams, speak_any_text
from .parser import ExitCode, UsageError, read_elsewhere


class Command(NamedTuple):
    """A subcommand: what it does, and the module whose `run(argv)` does it, from `commands` on."""

    summary: str
    module: str
    prints: bool = True  # what it is for, so that without a standard output there is nothing to do


COMMANDS = {
    "serve": Command("serve a model over HTTP, with OpenAI's API", ".serve", prints=False),
    "generate": Command("continue one or more prompts", ".generate"),
    "chat": Command("talk to a chat model, or answer what is piped in", ".chat"),
    "embed": Command("turn texts into vectors", ".embed"),
    "rerank": Command("order documents by how well they answer a query", ".rerank"),
    "pull": Command("download a model from the Hugging Face hub", ".pull"),
    "launch": Command("run a coding agent on a server: claude, codex, opencode", ".launch"),
    "daemon": Command("start, stop, restart an engine in the background", ".daemon", prints=False),
    "keys": Command("make keys for frontends on other machines", ".keys"),
    "ps": Command("list the daemons that run", ".ps"),
    "top": Command("watch an engine in the terminal", ".top"),
    "run-batch": Command("run a file of OpenAI requests, a result line for each", ".run_batch", prints=False),
    "bench": Command(
        "measure: beside peers, beside the hardware's floors, under load", "....tools.bench.cli"
    ),
    "quantize": Command("make a checkpoint of 4 or 8 bits of a plain one", "....tools.quantize.cli"),
    "stress": Command("kill processes under load and check every token", "....tools.stress.cli"),
    "doctor": Command("check this machine: versions, devices, what is missing", ".doctor"),
    "completion": Command("print a shell's completion script", ".completion"),
}

ALIASES = {"complete": "generate", "collect-env": "doctor"}  # as vLLM calls them

# What a disk or a terminal answers that takes no more: the cause is the machine's, and the text says it all.
_UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
_EXAMPLES = """\
examples:
  quire generate "Once upon a time"
  echo "What is 12 plus 30?" | quire chat
  quire rerank "how do plants drink?" < notes.txt
  quire generate --model ./my-model --json "One" "Two" > out.jsonl
"""


def run_command(argv: Sequence[str] | None = None) -> int:
    """Run one command line to its exit code. Nothing is raised; errors are one line on stderr."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments:
        arguments[0] = ALIASES.get(arguments[0], arguments[0])
    command = COMMANDS.get(arguments[0]) if arguments else None
    if _is_closed(sys.stdout) and (command is None or command.prints):
        return ExitCode.OUTPUT_CLOSED  # by the caller, so nobody reads
    open_closed_streams()
    speak_any_text()
    if "_ARGCOMPLETE" in os.environ:
        importlib.import_module(COMMANDS["completion"].module, f"{__package__}.commands").complete()
    arguments = list(map(_read_as_utf8, arguments))
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()  # here, where what cannot be written has an answer
    except KeyboardInterrupt:
        code = ExitCode.INTERRUPTED
    except BrokenPipeError:
        code = ExitCode.OUTPUT_CLOSED
    except (UsageError, InputError) as error:
        code = _report(str(error), ExitCode.USAGE)
    except QuireError as error:
        code = _report(str(error), ExitCode.FAILED)
    except Exception as error:
        if not isinstance(error, OSError) or error.errno not in _UNWRITABLE:
            _print_traceback()
        code = _report(_describe_root_cause(error), ExitCode.FAILED)
    discard_unwritable(sys.stdout)
    discard_unwritable(sys.stderr)
    return code


def _read_as_utf8(argument: str) -> str:
    """A word of the command line, whatever encoding Python took the terminal's to be."""
    try:
        return os.fsencode(argument).decode()
    except UnicodeError:  # no text, which whoever reads it says
        return argument


def _is_closed(stream: object) -> bool:
    return stream is None  # what Python makes of it


def _dispatch(argv: list[str]) -> int:
    name = argv[0] if argv else "--help"
    if name in ("-h", "--help", "help"):
        print(_help_text(), end="")
        return ExitCode.OK if argv else ExitCode.USAGE
    if name in ("-V", "--version", "version"):
        from ... import __version__

        print(f"quire {__version__}")
        return ExitCode.OK
    command = COMMANDS.get(name)
    if command is None:
        hint = did_you_mean(name, [*COMMANDS, *ALIASES, "--help", "--version"])
        if (other := read_elsewhere("commands").get(name)) is not None:
            hint = f", did you mean {other}?"
        raise UsageError(f"{name!r}: not a command{hint or ', one of ' + ', '.join(COMMANDS)}")
    try:
        with paused_collector():
            module = importlib.import_module(command.module, f"{__package__}.commands")
        return module.run(argv[1:])
    except SystemExit as end:  # how argparse leaves after it has printed its help
        return int(end.code or 0)


def _help_text() -> str:
    rows = "".join(f"  {name:<10} {command.summary}\n" for name, command in COMMANDS.items())
    return (
        "usage: quire COMMAND [OPTIONS]\n\nAn LLM inference engine.\n\n"
        f"commands:\n{rows}\n"
        "options:\n  --help     this text; `quire COMMAND --help` has the options\n"
        "  --version  the version\n\n" + _EXAMPLES
    )


def _report(text: str, code: ExitCode) -> ExitCode:
    discard_unwritable(sys.stdout)  # before the error's line, where both go to one place
    with contextlib.suppress(OSError):
        print(f"quire: error: {_show(text)}", file=sys.stderr)
    return code


def _show(text: str) -> str:
    """With the names of files, models and daemons in it, which may hold what steers a terminal."""
    return "\n".join(map(make_printable, text.split("\n")))


def _print_traceback() -> None:
    """Of what nobody raised on purpose, so a bug: where it happened is worth the lines."""
    import traceback

    with contextlib.suppress(OSError):
        traceback.print_exc()


def _describe_root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, OSError) and error.errno in _UNWRITABLE:
        return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)
    return f"{type(error).__name__}: {error}"
