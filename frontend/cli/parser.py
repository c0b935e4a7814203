"""Parsers of command lines: the commands' own, whose errors are UsageErrors in the house's form (field=value:
what is allowed), and one for users' scripts; and what the command's exit codes mean.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from enum import IntEnum
from typing import Any, NoReturn

from ...ipc.errors import QuireError, did_you_mean
from .config_file import FLAG, expand_config

_INVALID_VALUE = re.compile(r"argument (?P<field>[^:]+): invalid (?P<kind>\w+) value: (?P<value>.*)", re.S)
_INVALID_CHOICE = re.compile(
    r"argument (?P<field>[^:]+): invalid choice: (?P<value>.*) \(choose from (?P<allowed>.*)\)", re.S
)
_OTHER = re.compile(r"argument (?P<field>[^:]+): (?P<rest>.*)", re.S)
_NAME_OF_TYPE = {"int": "an integer", "float": "a number"}


class ExitCode(IntEnum):
    """Every exit code of the `quire` command."""

    OK = 0
    FAILED = 1  # it started and could not finish; the last line on stderr is the root cause
    USAGE = 2  # a value that the user gave cannot be used; nothing was started
    INTERRUPTED = 130  # Ctrl-C, as shells report SIGINT
    OUTPUT_CLOSED = 141  # the reader of stdout left, as shells report SIGPIPE


class UsageError(QuireError):
    """The command line cannot be used; the text says what is wrong and what is allowed."""


class Described(Exception):
    """Raised in the place of running a command that `describe` asks about."""

    def __init__(self, what: Parser | tuple[str, ...]) -> None:
        self.what = what


_is_description = ContextVar("_is_description", default=False)


def describe(run: Callable[[Sequence[str]], int], words: Sequence[str] = ()) -> Parser | tuple[str, ...]:
    """The parser with which `run(words)` reads its options, or the names of its subcommands. Runs nothing."""
    token = _is_description.set(True)
    try:
        code = run(words)
    except Described as found:
        return found.what
    finally:
        _is_description.reset(token)
    raise AssertionError(f"{words} ended with {code} before its options were read")


def name_commands_if_asked(argv: Sequence[str], names: Iterable[str]) -> None:
    """Raise Described where `describe` asks which commands there are."""
    if _is_description.get() and not argv:
        raise Described(tuple(names))


class Parser(argparse.ArgumentParser):
    """Options are spelled in full, and an unknown one is answered with the closest known one."""

    Switch = argparse.BooleanOptionalAction  # --stream and --no-stream

    def __init__(self, prog: str, description: str, epilog: str | None = None, arguments: str = "") -> None:
        super().__init__(
            prog=prog,
            usage=f"{prog} [OPTIONS]{arguments}",  # the options stand below, with what they mean
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            # The engine has a --seed too (dummy weights); at the command line it is the request's.
            conflict_handler="resolve",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse all of `argv`; raises UsageError, or Described where `describe` asks.

        Options may stand between positional arguments.

        As in vLLM an option may have '_' for '-', and `--config` names a file with more of them.
        """
        if _is_description.get():
            raise Described(self)
        words = spell_with_dashes(argv, self._option_string_actions)
        if FLAG in self._option_string_actions:
            words = expand_config(self._option_string_actions, words)
        options, rest = self.parse_known_intermixed_args(words)
        for word in rest:
            if word.startswith("-"):
                flag = word.split("=", 1)[0]
                hint = did_you_mean(flag, self._option_string_actions)
                raise UsageError(
                    f"{flag}: not an option of '{self.prog}'{hint or f', see {self.prog} --help'}"
                )
        if rest:
            raise UsageError(f"{rest[0]!r}: '{self.prog}' takes no such argument, see {self.prog} --help")
        return options

    @property
    def actions(self) -> Mapping[str, argparse.Action]:
        """Its options, by flag."""
        return self._option_string_actions

    def _print_message(self, message: str, file: Any = None) -> None:
        """As argparse's, which says nothing when it cannot write."""
        (file or sys.stderr).write(message)

    def error(self, message: str) -> NoReturn:
        raise UsageError(in_house_form(message))


def run_subcommand(
    prog: str, usage: str, commands: Mapping[str, Callable[[Sequence[str]], int]], argv: Sequence[str]
) -> int:
    """Run the command that `argv` begins with, or print `usage`; raises UsageError for any other word."""
    name_commands_if_asked(argv, commands)
    name = argv[0] if argv else "--help"
    if name in ("-h", "--help", "help"):
        print(usage, end="")
        return ExitCode.OK if argv else ExitCode.USAGE
    command = commands.get(name)
    if command is None:
        raise UsageError(f"{name!r}: not a command of {prog!r}, one of {', '.join(commands)}")
    return command(argv[1:])


def split_at_dashes(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """What stands before a lone '--', and the words after it, which are never options."""
    words = list(argv)
    if "--" not in words:
        return words, []
    place = words.index("--")
    return words[:place], words[place + 1 :]


def in_house_form(message: str) -> str:
    """argparse's error text as field=value: allowed, or unchanged where it names no value."""
    if match := _INVALID_VALUE.fullmatch(message):
        allowed = _NAME_OF_TYPE.get(match["kind"], f"a value of type {match['kind']}")
        return f"{_field_name(match['field'])}={match['value']}: {allowed}"
    if match := _INVALID_CHOICE.fullmatch(message):
        return (
            f"{_field_name(match['field'])}={match['value']}: one of {match['allowed'].replace(chr(39), '')}"
        )
    if match := _OTHER.fullmatch(message):
        return f"{match['field']}: {match['rest']}"
    return message


def _field_name(flags: str) -> str:
    """'-m/--max-tokens' -> 'max_tokens', as SamplingParams and EngineArgs name it."""
    return flags.split("/")[-1].lstrip("-").replace("-", "_")


class FlexibleArgumentParser(argparse.ArgumentParser):
    """Options may be spelled with '_' for '-', and a `--config FILE.yaml` that it has is read.

    `EngineArgs.add_cli_args` fills it, and `LLM(**vars(parser.parse_args()))` uses what it gives.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        known = self._option_string_actions
        words = spell_with_dashes(sys.argv[1:] if args is None else args, known)
        if FLAG in known:
            words = expand_config(known, words)
        return super().parse_known_args(words, namespace)


def spell_with_dashes(words: Iterable[str], known: Collection[str]) -> list[str]:
    """Command line words with options such as --max_tokens as `known` has them."""
    return [_with_dashes(word, known) for word in words]


def _with_dashes(word: str, known: Collection[str]) -> str:
    flag, sign, value = word.partition("=")
    dashed = flag.replace("_", "-")
    is_spelled_so = flag.startswith("--") and flag not in known and dashed in known
    return f"{dashed}{sign}{value}" if is_spelled_so else word
