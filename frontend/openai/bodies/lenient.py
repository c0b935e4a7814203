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


@functools.cache
def make_lenient(kind: type[T]) -> type[T]:
    """A subclass whose values, and those within them, have unknown fields left out when they are decoded."""
    hints = get_type_hints(kind, include_extras=True)
    changed: list[tuple[str, Any, Any]] = []
    for field in msgspec.structs.fields(kind):
        hint = _relax(hints[field.name])
        if hint is not hints[field.name]:
            default = field.default_factory if field.default is NODEFAULT else field.default
            is_made = field.default is NODEFAULT and field.default_factory is not NODEFAULT
            made = msgspec.field(default_factory=cast(Any, default)) if is_made else default
            changed.append((field.name, hint, made))
    config = kind.__struct_config__
    return cast(
        type[T],
        msgspec.defstruct(
            kind.__name__,
            [(name, hint) if made is NODEFAULT else (name, hint, made) for name, hint, made in changed],
            bases=(kind,),
            module=kind.__module__,
            tag=config.tag,
            tag_field=config.tag_field,
            frozen=config.frozen,
            omit_defaults=config.omit_defaults,
            kw_only=True,
            forbid_unknown_fields=False,
        ),
    )


@functools.cache
def make_lenient_body(kind: type[T]) -> type[T]:
    """As make_lenient, of a whole body: a field that has another name today is still known, to be refused."""
    lenient = make_lenient(kind)
    if not issubclass(kind, SharedFields):
        return lenient
    old = [(name, Any, None) for name in RENAMED_FIELDS]
    return cast(
        type[T], msgspec.defstruct(kind.__name__, old, bases=(lenient,), module=kind.__module__, kw_only=True)
    )


def is_lenient(request: msgspec.Struct) -> bool:
    """Whether a body was decoded as such a kind."""
    return not type(request).__struct_config__.forbid_unknown_fields


def _relax(hint: Any) -> Any:
    """A field's type with the lenient kinds; the same object where it has no kinds."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return make_lenient(hint)
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
