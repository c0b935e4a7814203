"""Options of an engine as the fields of its config declare them: type, range, default, group and text once.

The config's checks, EngineArgs, command lines, `--config` files and docs/options.md are made of these. Knows
none of them.
"""

from __future__ import annotations

import functools
from typing import Any

import msgspec
from msgspec import Meta

from ..errors import ConfigError
from ..params.param_fields import MAX_INT, ParamField, read_declaration

MAX_SIZE_BYTES = 2**63 - 1
MAX_SECONDS = 86400.0  # a day; a poll cannot wait for any length


def option(text: str, low: float | None = None, high: float = MAX_INT, **more: Any) -> Meta:
    """A field that users set: what it is ("" is not shown), and for a number its range.

    more: as ParamField.get; `name` where users call it otherwise than the field; `group` where they find it
    elsewhere than the other fields of its config; `alias`, another flag; `default=None` where the frontend
    finds a value for who gives none.
    """
    if low is None:
        return Meta(description=text, extra=more)
    return Meta(ge=0 if "zero" in more else low, le=high, description=text, extra={"low": low, **more})


def size(text: str, low: int = 1) -> Meta:
    """Bytes, which users may give with a unit."""
    return option(text, low, MAX_SIZE_BYTES, is_size=True)


def seconds(text: str, low: float, **more: Any) -> Meta:
    """At least so many; more: as of `option`."""
    zero = f", or 0 for {more['zero']}" if "zero" in more else ""
    return option(text, low, MAX_SECONDS, allowed=f"seconds from {low:g} to {MAX_SECONDS:g}{zero}", **more)


def fraction(text: str) -> Meta:
    """Above 0, and up to 1."""
    return Meta(gt=0.0, le=1.0, description=text, extra={"allowed": "a number above 0 and up to 1"})


class Option(ParamField, frozen=True):
    """A declared field of a config."""

    field: str  # its name in the config
    default: Any  # of the config

    @property
    def text(self) -> str | None:
        """What it is; '' of one that is not shown, None of one that users do not set."""
        return self.meta.description

    @property
    def type(self) -> type:
        """bool, int, float or str."""
        return type(self.choices[0]) if self.choices else self.kind

    def describe_allowed(self, value: Any) -> str:
        """As users write it."""
        if self.choices:
            return f"one of {', '.join(map(str, self.choices))}"
        if self.kind is bool and self.is_optional:
            return "True, False or None"
        return super().describe_allowed(value)

    def _is_allowed(self, value: Any) -> bool:
        is_text = self.kind is str and not self.choices
        return is_text or super()._is_allowed(value)  # a text is checked by who reads it


@functools.cache
def read_options(config: type[msgspec.Struct]) -> tuple[Option, ...]:
    """The declared fields of a config, in their order: those with a range, a text or choices."""
    options: list[Option] = []
    for field in msgspec.structs.fields(config):
        hint, kind, is_optional, meta = read_declaration(field)
        name = (meta.extra or {}).get("name", field.name)
        option = Option(name, hint, kind, is_optional, meta, ConfigError, field.name, field.default)
        if meta != Meta() or option.choices:
            options.append(option)
    return tuple(options)


def check_options(config: msgspec.Struct) -> None:
    """Raise ConfigError for the first field whose value its declaration does not allow."""
    for option in read_options(type(config)):
        option.check(getattr(config, option.field))
