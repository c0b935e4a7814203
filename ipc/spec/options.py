"""Options of an engine as the fields of its config declare them: type, range, default, group and text once.

The config's checks, EngineArgs, command lines, `--config` files and docs/options.md are made of these. Knows
none of them.
"""

from __future__ import annotations

import functools
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta
from msgspec.structs import FieldInfo

from ..errors import ConfigError
from ..params.param_fields import MAX_INT

MAX_SIZE_BYTES = 2**63 - 1
MAX_SECONDS = 86400.0  # a day; a poll cannot wait for any length
_NUMBERS = {bool: (bool,), int: (int,), float: (int, float)}


def option(text: str, low: float | None = None, high: float = MAX_INT, **more: Any) -> Meta:
    """A field that users set: what it is ("" is not shown), and for a number its range.

    more: `name` where users call it otherwise than the field; `group` where they find it elsewhere than the
    other fields of its config; `alias`, another flag; `default=None` where the frontend finds a value for who
    gives none; `zero`, what 0 stands for, below the range; `choices`, the only values.
    """
    if low is None:
        return Meta(description=text, extra=more)
    return Meta(ge=0 if "zero" in more else low, le=high, description=text, extra={"low": low, **more})


def size(text: str, low: int = 1) -> Meta:
    """Bytes, which users may give with a unit."""
    return option(text, low, MAX_SIZE_BYTES, is_size=True)


def seconds(text: str, low: float, **more: Any) -> Meta:
    """At least so many."""
    return option(text, low, MAX_SECONDS, **more)


def fraction(text: str) -> Meta:
    """Above 0, and up to 1."""
    return Meta(gt=0.0, le=1.0, description=text)


class Option(msgspec.Struct, frozen=True):
    """A declared field of a config. name: as users know it. kind: bool, int, float, str or a Literal."""

    name: str
    field: str
    kind: Any
    is_optional: bool  # None is allowed
    default: Any  # of the config
    meta: Any  # msgspec's

    @property
    def text(self) -> str | None:
        """What it is; '' of one that is not shown, None of one that users do not set."""
        return self.meta.description

    @property
    def type(self) -> type:
        """bool, int, float or str."""
        return type(self.choices[0]) if self.choices else self.kind

    @property
    def choices(self) -> tuple[Any, ...]:
        """The values that are allowed; () where these are not so few."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else self.get("choices", ())

    def get(self, key: str, default: Any = None) -> Any:
        """More that `option` was told of it."""
        return (self.meta.extra or {}).get(key, default)

    def check(self, value: Any) -> None:
        """Raise ConfigError for a value that the declaration does not allow."""
        if not (self._is_allowed(value) or (value is None and self.is_optional)):
            raise ConfigError(self.name, value, self._describe_allowed())

    def _is_allowed(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices
        types = _NUMBERS.get(self.kind)
        if types is None:
            return True  # a text, which who reads it checks
        if not isinstance(value, types) or isinstance(value, bool) != (self.kind is bool):
            return False
        if self.kind is bool:
            return True
        is_above = value > self.meta.gt if self.meta.ge is None else value >= self._low
        return (is_above and value <= self.meta.le) or (value == 0 and self.get("zero") is not None)  # no NaN

    @property
    def _low(self) -> Any:
        return self.get("low", self.meta.ge)

    def _describe_allowed(self) -> str:
        most, zero = self.meta.le, self.get("zero")
        if self.choices:
            return f"one of {', '.join(map(str, self.choices))}"
        if self.kind is bool:
            return "True, False or None" if self.is_optional else "True or False"
        if self.kind is int:
            return f"an integer from {self._low} to {most}"
        if self.meta.ge is None:
            return f"a number above {self.meta.gt:g} and up to {most:g}"
        return f"seconds from {self._low:g} to {most:g}{f', or 0 for {zero}' if zero else ''}"


@functools.cache
def read_options(config: type[msgspec.Struct]) -> tuple[Option, ...]:
    """The declared fields of a config, in their order: those with a range, a text or choices."""
    options = map(_read_option, msgspec.structs.fields(config))
    return tuple(option for option in options if option is not None)


def check_options(config: msgspec.Struct) -> None:
    """Raise ConfigError for the first field whose value its declaration does not allow."""
    for each in read_options(type(config)):
        each.check(getattr(config, each.field))


def _read_option(field: FieldInfo) -> Option | None:
    is_optional = NoneType in get_args(field.type)
    inner = get_args(field.type)[0] if is_optional else field.type
    meta = next((each for each in getattr(inner, "__metadata__", ()) if isinstance(each, Meta)), None)
    kind = inner.__origin__ if meta is not None else inner
    if meta is None and get_origin(kind) is not Literal:
        return None
    meta = meta or Meta()
    name = (meta.extra or {}).get("name", field.name)
    return Option(name, field.name, kind, is_optional, field.default, meta)
