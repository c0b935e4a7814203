"""Parameters as they are declared: type, range and text of each field once, as msgspec reads them.

Checks, HTTP schemas and CLI options are made of the declaration. Knows no parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any, NamedTuple, get_args, get_type_hints

from msgspec import Meta

from ..errors import InputError

MAX_INT = 2**31 - 1  # of counts and lengths without a limit of their own: the worker holds them as int32

_PLAIN = frozenset({str, int, float, bool, type(None), list, dict})


def bounds(low: float, high: float, text: str) -> Meta:
    """A number from `low` to `high`, and what it is."""
    return Meta(ge=low, le=high, description=text)


class ParamField(NamedTuple):
    """A field of parameters as it is declared."""

    name: str
    hint: Any  # its type without None, as msgspec reads it
    kind: Any  # int, float, bool, str, or what is neither scalar nor text
    is_optional: bool  # None is allowed
    meta: Any  # msgspec's Meta: range and text; extra["allowed"]: other words for the range
    error: type[InputError]  # what a bad value raises

    def describe_allowed(self, value: Any) -> str:
        """What a scalar or text may be instead of `value`."""
        meta = self.meta
        if meta.extra is not None:
            return meta.extra["allowed"]
        if self.kind is bool:
            return "True or False"
        if self.kind is str:
            return f"a text of {meta.min_length or 0} to {meta.max_length} characters"
        if self.kind is int:
            return f"an integer from {meta.ge} to {meta.le}"
        if meta.gt is not None and value == meta.gt:
            return f"a number above {meta.gt:g} and up to {meta.le:g}"
        low = meta.gt if meta.ge is None else meta.ge
        return f"a number from {low:g} to {meta.le:g}"

    def check(self, value: Any) -> Any:
        """The scalar or text; as a float where the field is one, which not every integer can become.

        Raises `error`.
        """
        if value is None and self.is_optional:
            return None
        kind: Callable[[Any], Any] = self.kind
        meta = self.meta
        if isinstance(value, bool) or kind is bool:
            is_allowed = isinstance(value, bool) and kind is bool
        elif kind is str:
            is_allowed = isinstance(value, str) and (meta.min_length or 0) <= len(value) <= meta.max_length
        elif isinstance(value, (int, float) if kind is float else int):
            is_above = value >= meta.ge if meta.gt is None else value > meta.gt
            is_allowed = is_above and value <= meta.le  # NaN is neither
        else:
            is_allowed = False
        if not is_allowed:
            raise self.error(self.name, value, self.describe_allowed(value))
        return kind(value)

    def check_truncation(self, value: Any) -> int | None:
        """As `check`, for a number of tokens to which a prompt is cut: -1, or at least 1."""
        if self.check(value) == 0:
            raise self.error(self.name, value, f"-1, or an integer from 1 to {self.meta.le}")
        return value

    def check_choice(self, choices: Sequence[str], value: Any) -> str:
        """The one of `choices` that the value is. Raises `error`."""
        if not isinstance(value, str) or value not in choices:
            raise self.error(self.name, value, f"one of {', '.join(map(repr, choices))}")
        return value


def read_fields(params: type, error: type[InputError]) -> dict[str, ParamField]:
    """The fields of a class of parameters, by name; `error` is what a bad value raises."""
    hints = get_type_hints(params, include_extras=True)
    return {name: _read_field(name, hint, error) for name, hint in hints.items()}


def _read_field(name: str, hint: Any, error: type[InputError]) -> ParamField:
    is_optional = NoneType in get_args(hint)
    inner = get_args(hint)[0] if is_optional else hint
    kind, meta = get_args(inner) or (inner, Meta())
    return ParamField(name, inner, kind, is_optional, meta, error)


def make_plain(value: Any) -> Any:
    """The bool, int, float or str that a value of another type stands for; any other value as it is.

    Subclasses are taken for what they hold, whatever they make of it; a scalar of numpy, torch and the like
    says itself which it is.
    """
    if type(value) in _PLAIN:
        return value
    if getattr(value, "shape", None) == () and callable(getattr(value, "item", None)):
        value = value.item()
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    return value
