"""Kinds of bodies that leave out what they do not know, made of those that refuse it (--unknown-fields)."""

from __future__ import annotations

import functools
import operator
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgspec
from msgspec import NODEFAULT

from ....ipc.structured_outputs import RENAMED_FIELDS
from .schema import SharedFields

T = TypeVar("T", bound=msgspec.Struct)


def make_lenient(kind: type[T]) -> type[T]:
    """A subclass whose values, and those within them, have unknown fields left out when they are decoded."""
    return cast(type[T], _make_kind(kind))


def make_lenient_body(kind: type[T]) -> type[T]:
    """As make_lenient, of a whole body: a field that has another name today is still known, to be refused."""
    return cast(type[T], _make_body_kind(kind))


@functools.cache
def _make_body_kind(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    if not issubclass(kind, SharedFields):
        return _make_kind(kind)
    old = [(name, Any, None) for name in RENAMED_FIELDS]
    bases = (_make_kind(kind),)
    return msgspec.defstruct(kind.__name__, old, bases=bases, module=kind.__module__, kw_only=True)


@functools.cache
def _make_kind(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    hints = get_type_hints(kind, include_extras=True)
    changed: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    for field in msgspec.structs.fields(kind):
        hint = _relax(hints[field.name])
        if hint is hints[field.name]:
            continue
        if field.default_factory is not NODEFAULT:
            changed.append((field.name, hint, msgspec.field(default_factory=field.default_factory)))
        elif field.default is not NODEFAULT:
            changed.append((field.name, hint, field.default))
        else:
            changed.append((field.name, hint))
    config = kind.__struct_config__
    return msgspec.defstruct(
        kind.__name__,
        changed,
        bases=(kind,),
        module=kind.__module__,
        tag=config.tag,
        tag_field=config.tag_field,
        frozen=config.frozen,
        omit_defaults=config.omit_defaults,
        kw_only=True,
        forbid_unknown_fields=False,
    )


def is_lenient(request: msgspec.Struct) -> bool:
    """Whether a body was decoded as such a kind."""
    return not type(request).__struct_config__.forbid_unknown_fields


def _relax(hint: Any) -> Any:
    """A field's type with the lenient kinds; the same object where it has no kinds."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return _make_kind(hint)
    origin, given = get_origin(hint), get_args(hint)
    if origin is None or not given:
        return hint
    inner = given[:1] if origin is Annotated else given
    relaxed = tuple(map(_relax, inner))
    if all(map(operator.is_, relaxed, inner)):
        return hint
    if origin is Annotated:
        return Annotated[(relaxed[0], *given[1:])]
    if origin in (Union, UnionType):
        return functools.reduce(operator.or_, relaxed)
    return origin[relaxed]
