"""Fields as they are declared: type, range and text of each once, as msgspec reads them.

Checks, HTTP schemas and CLI options are made of the declaration. Knows no parameter, and no option of the
engine, which are such fields too.
"""

from __future__ import annotations

from types import NoneType
from typing import Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta
from msgspec.structs import FieldInfo

from ..errors import InputError

MAX_INT = 2**31 - 1  # of counts and lengths without a limit of their own: the worker holds them as int32

_PLAIN = frozenset({str, int, float, bool, type(None), list, dict})


def bounds(low: float, high: float, text: str) -> Meta:
    """A number from `low` to `high`, and what it is."""
    return Meta(ge=low, le=high, description=text)


class ParamField(msgspec.Struct, frozen=True):
    """A field of parameters as it is declared."""

    name: str  # as users know it
    hint: Any  # its type without None, as msgspec reads it
    kind: Any  # int, float, bool, str, a Literal, or what is none of these
    is_optional: bool  # None is allowed
    meta: Any  # msgspec's Meta: range and text; its extra: see `get`
    error: type[InputError]  # what a bad value raises

    @property
    def choices(self) -> tuple[Any, ...]:
        """The values that are allowed; () where these are not so few."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else self.get("choices", ())

    def get(self, key: str, default: Any = None) -> Any:
        """More that is declared. allowed: other words for the range; zero: what 0 stands for, below `low`."""
        return (self.meta.extra or {}).get(key, default)

    def check(self, value: Any) -> Any:
        """The scalar, text or choice; as a float where the field is one, which not every integer can become.

        Raises `error`.
        """
        if value is None and self.is_optional:
            return None
        if value is None or not self._is_allowed(value):
            raise self.error(self.name, value, self.describe_allowed(value))
        return float(value) if self.kind is float else value

    def check_truncation(self, value: Any) -> int | None:
        """As `check`, for a number of tokens to which a prompt is cut: -1, or at least 1."""
        if self.check(value) == 0:
            raise self.error(self.name, value, f"-1, or an integer from 1 to {self.meta.le}")
        return value

    def describe_allowed(self, value: Any) -> str:
        """What a scalar, text or choice may be instead of `value`."""
        meta = self.meta
        if (allowed := self.get("allowed")) is not None:
            return allowed
        if self.choices:
            return f"one of {', '.join(map(repr, self.choices))}"
        if self.kind is bool:
            return "True or False"
        if self.kind is str:
            return f"a text of {meta.min_length or 0} to {meta.max_length} characters"
        if self.kind is int:
            return f"an integer from {self._low} to {meta.le}"
        if meta.gt is not None and value == meta.gt:
            return f"a number above {meta.gt:g} and up to {meta.le:g}"
        return f"a number from {self._low:g} to {meta.le:g}"

    @property
    def _low(self) -> Any:
        return self.get("low", self.meta.gt if self.meta.ge is None else self.meta.ge)

    def _is_allowed(self, value: Any) -> bool:
        kind, meta = self.kind, self.meta
        if choices := self.choices:
            return type(value) is type(choices[0]) and value in choices
        if kind is str:
            return isinstance(value, str) and (meta.min_length or 0) <= len(value) <= meta.max_length
        if kind is bool or isinstance(value, bool):
            return kind is bool and isinstance(value, bool)
        if not isinstance(value, (int, float) if kind is float else int):
            return False
        is_above = value >= self._low if meta.gt is None else value > meta.gt
        return (is_above and value <= meta.le) or (value == 0 and self.get("zero") is not None)  # no NaN


def read_fields(
    params: type[msgspec.Struct], error: type[InputError], prefix: str = ""
) -> dict[str, ParamField]:
    """The fields of a class, by name. A bad value raises `error`, which names the field behind `prefix`."""
    return {
        field.name: ParamField(f"{prefix}{field.name}", *read_declaration(field), error)
        for field in msgspec.structs.fields(params)
    }


def read_declaration(field: FieldInfo) -> tuple[Any, Any, bool, Any]:
    """hint, kind, is_optional and meta of a ParamField."""
    is_optional = NoneType in get_args(field.type)
    hint = get_args(field.type)[0] if is_optional else field.type
    metas = [each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Meta)]
    return hint, hint.__origin__ if metas else hint, is_optional, metas[0] if metas else Meta()


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
