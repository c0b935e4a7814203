"""Options of a tool, as fields of a dataclass that say their defaults, their help and what is allowed."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import field, fields
from typing import Any, NamedTuple, TypeVar

from ..frontend.cli.parser import Parser
from ..ipc.errors import InputError

_Options = TypeVar("_Options")


class Check(NamedTuple):
    """What a value has to be: `is_ok` decides, `allowed` says it."""

    is_ok: Callable[[Any], bool]
    allowed: str


COUNT = Check(lambda value: value >= 1, "an integer of at least 1")
INDEX = Check(lambda value: value >= 0, "an integer of at least 0")
POSITIVE = Check(lambda value: 0 < value < math.inf, "a number above 0")


def option(default: Any, text: str, check: Check | None = None, **argument: Any) -> Any:
    """A field of a dataclass of options. A tuple takes several values, each of which is checked.

    argument: of argparse, where the default does not say it; `flag` where the field has another name.
    """
    metadata = {"text": text, "check": check, "argument": argument}
    return field(default=default, metadata=metadata)


def parse_options(kind: type[_Options], prog: str, argv: Sequence[str], epilog: str = "") -> _Options:
    """The options of a command line. Their class's docstring says what the command does.

    Raises UsageError, and InputError for a value that may not be.
    """
    parser = Parser(prog, (kind.__doc__ or "").strip(), epilog)
    add_options(parser, kind)
    return make_options(kind, parser.parse(argv))


def add_options(parser: argparse.ArgumentParser, kind: type[Any]) -> None:
    """The options of `kind`, which `make_options` reads."""
    for item in fields(kind):
        default, argument = item.default, dict(item.metadata["argument"])
        flag = argument.pop("flag", "--" + item.name.replace("_", "-"))
        if default is False:
            argument["action"] = "store_true"
        elif default is True:
            argument["action"] = argparse.BooleanOptionalAction
        elif isinstance(default, tuple):
            argument.setdefault("nargs", "+")
            argument.setdefault("type", type(default[0]) if default else str)
        elif default is not None:
            argument.setdefault("type", type(default))
        parser.add_argument(flag, dest=item.name, default=default, help=item.metadata["text"], **argument)


def make_options(kind: type[_Options], parsed: argparse.Namespace) -> _Options:
    """The options as they were given. Raises InputError for a value that may not be."""
    values: dict[str, Any] = {}
    for item in fields(kind):  # pyright: ignore[reportArgumentType]
        value: Any = getattr(parsed, item.name)
        check = item.metadata["check"]
        if isinstance(item.default, tuple):
            value = each_of = tuple(value or ())
        else:
            each_of = () if value is None else (value,)
        for each in each_of:
            if check is not None and not check.is_ok(each):
                name = item.metadata["argument"].get("flag", item.name).removeprefix("--").replace("-", "_")
                raise InputError(name, each, check.allowed)
        values[item.name] = value
    return kind(**values)
