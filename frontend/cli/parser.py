"""Parsers of command lines: the commands' own, whose errors are UsageErrors in the house's form (field=value:
what is allowed), and one for users' scripts; their --config files; and what the command's exit codes mean.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from enum import IntEnum
from pathlib import Path
from typing import Any, NoReturn, cast

from ...ipc.errors import ConfigError, QuireError, did_you_mean

# --config FILE.yaml: options of a command in a file, as the words that the command line would have. What
# the command line says wins. Only who gives the option loads PyYAML.

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
    flags = (word.partition("=")[0] for word in words)
    on_command_line = {id(actions[flag]) for flag in flags if flag in actions}
    expanded: list[str] = []
    for name, value in _read_options(paths[0]).items():
        flag = f"--{name.replace('_', '-')}"
        if flag not in actions and "--max-model-len" in actions:
            from ..options.off_values import drop_off_values

            if not drop_off_values({name.replace("-", "_"): value}):
                continue
        if flag not in actions or flag in (FLAG, "--help"):
            hint = did_you_mean(flag, actions)
            raise ConfigError(f"config {paths[0]} {name}", value, f"an option of this command{hint}")
        if id(actions[flag]) not in on_command_line and value is not None:
            expanded += _make_words(f"{paths[0]} {name}", flag, actions[flag], value)
    return [*expanded, *words]


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
        return [f"{flag}={_as_word(place, item)}" for item in cast(list[Any], value)]
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


_INVALID_VALUE = re.compile(r"argument (?P<field>[^:]+): invalid (?P<kind>\w+) value: (?P<value>.*)", re.S)
_INVALID_CHOICE = re.compile(
    r"argument (?P<field>[^:]+): invalid choice: (?P<value>.*) \(choose from (?P<allowed>.*)\)", re.S
)
_OTHER = re.compile(r"argument (?P<field>[^:]+): (?P<rest>.*)", re.S)
_NAME_OF_TYPE = {"int": "an integer", "float": "a number"}


def read_elsewhere(kind: str) -> dict[str, str]:
    """Commands or options of Ollama and llama.cpp, and what there is in their place."""
    return json.loads(Path(__file__).with_name("elsewhere.json").read_text())[kind]


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
    except Described as described:
        return described.what
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
        self._check_elsewhere(words)
        words = _drop_off_options(words, self._option_string_actions)
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

    def _check_elsewhere(self, words: Sequence[str]) -> None:
        """Before argparse takes -hf for -h."""
        known = self._option_string_actions
        flags = [word.partition("=")[0] for word in split_at_dashes(words)[0] if word.startswith("-")]
        for flag in flags if any(flag not in known for flag in flags) else ():
            if flag not in known and (name := read_elsewhere("options").get(flag)) in known:
                raise UsageError(f"{flag}: not an option of '{self.prog}', did you mean {name!r}?")

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
        hint = did_you_mean(name, commands) or f", one of {', '.join(commands)}"
        raise UsageError(f"{name!r}: not a command of {prog!r}{hint}")
    return command(argv[1:])


def split_at_dashes(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """What stands before a lone '--', and the words after it, which are never options."""
    words = list(argv)
    if "--" not in words:
        return words, []
    place = words.index("--")
    return words[:place], words[place + 1 :]


def in_house_form(message: str) -> str:
    """argparse's error text as field=value: expected ..., or unchanged where it names no value."""
    if match := _INVALID_VALUE.fullmatch(message):
        allowed = _NAME_OF_TYPE.get(match["kind"], f"a value of type {match['kind']}")
        return f"{_field_name(match['field'])}={match['value']}: expected {allowed}"
    if match := _INVALID_CHOICE.fullmatch(message):
        allowed = match["allowed"].replace("'", "")
        return f"{_field_name(match['field'])}={match['value']}: expected one of {allowed}"
    if match := _OTHER.fullmatch(message):
        return f"{match['field']}: {match['rest']}"
    return message


def _field_name(flags: str) -> str:
    """'-m/--max-tokens' -> 'max_tokens', as SamplingParams and EngineArgs name it."""
    return flags.split("/")[-1].lstrip("-").replace("-", "_")


def _drop_off_options(words: list[str], known: Mapping[str, argparse.Action]) -> list[str]:
    """Without vLLM's engine options that ask for nothing, where the engine's options are."""
    flags = (word.partition("=")[0] for word in words if word.startswith("--"))
    if "--max-model-len" not in known or all(flag in known for flag in flags):
        return words
    from ..options.off_values import drop_off_options

    return drop_off_options(words, known)


class FlexibleArgumentParser(argparse.ArgumentParser):
    """Options may be spelled with '_' for '-', and a `--config FILE.yaml` that it has is read.

    `EngineArgs.add_cli_args` fills it, and `LLM(**vars(parser.parse_args()))` uses what it gives.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        known = self._option_string_actions
        words = spell_with_dashes(sys.argv[1:] if args is None else args, known)
        if FLAG in known:
            words = expand_config(known, words)
        words = _drop_off_options(words, known)
        return super().parse_known_args(words, namespace)


def spell_with_dashes(words: Iterable[str], known: Collection[str]) -> list[str]:
    """Command line words with options such as --max_tokens as `known` has them."""
    return [_with_dashes(word, known) for word in words]


def _with_dashes(word: str, known: Collection[str]) -> str:
    flag, sign, value = word.partition("=")
    dashed = flag.replace("_", "-")
    is_spelled_so = flag.startswith("--") and flag not in known and dashed in known
    return f"{dashed}{sign}{value}" if is_spelled_so else word
