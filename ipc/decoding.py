"""Typed decoding and conversion by msgspec: the only place that has it read a type.

msgspec 0.22 hands a type whose description one thread still builds to another thread, which then crashes. So
types are read under one lock, whoever comes first; afterwards this costs a look into a set. It knows no type.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import UnionType
from typing import Any, TypeVar, cast, overload

import msgspec

T = TypeVar("T")
Encoded = bytes | bytearray | memoryview | msgspec.Raw

_reading = threading.Lock()
_read_types = set[Any]()


def _unlock_in_fork() -> None:
    """The thread that may have held the lock is not there."""
    global _reading
    _reading = threading.Lock()


os.register_at_fork(after_in_child=_unlock_in_fork)


def read_type(kind: Any) -> None:
    """Have msgspec read a type whole, which several threads may then decode or convert to at once."""
    if kind not in _read_types:
        with _reading:
            msgspec.json.Decoder(kind)
        _read_types.add(kind)


@overload
def decode_json(data: Encoded | str, kind: type[T]) -> T: ...
@overload
def decode_json(data: Encoded | str, kind: UnionType) -> Any: ...
def decode_json(data: Encoded | str, kind: Any) -> Any:
    """As msgspec.json.decode."""
    read_type(kind)
    return msgspec.json.decode(data, type=kind)


def decode_msgpack(data: Encoded, kind: type[T]) -> T:
    """As msgspec.msgpack.decode."""
    read_type(kind)
    return msgspec.msgpack.decode(data, type=kind)


def convert(value: object, kind: type[T], *, strict: bool = True) -> T:
    """As msgspec.convert."""
    read_type(kind)
    return msgspec.convert(value, kind, strict=strict)


def make_json_decoder(
    kind: type[T], read_float: Callable[[str], Any] | None = None
) -> Callable[[Encoded | str], T]:
    """The `decode` of a Decoder, which is faster than `decode_json`. read_float: makes the numbers of Any."""
    with _reading:
        return cast(Callable[[Encoded | str], T], msgspec.json.Decoder(kind, float_hook=read_float).decode)


@overload
def make_msgpack_decoder(kind: type[T]) -> Callable[[Encoded], T]: ...
@overload
def make_msgpack_decoder(kind: UnionType) -> Callable[[Encoded], Any]: ...
def make_msgpack_decoder(kind: Any) -> Callable[[Encoded], Any]:
    """As make_json_decoder."""
    with _reading:
        return msgspec.msgpack.Decoder(kind).decode
