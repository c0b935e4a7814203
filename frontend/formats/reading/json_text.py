"""JSON as a model writes it: its extent is found while it comes, its text goes on unchanged."""

from __future__ import annotations

import json
import re

import msgspec

from .marked_text import MARKS
from .text_source import Sink, Steps, TextSource, Unreadable

_STRING_BODY = re.compile(r'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_STRUCTURE = re.compile(rf'[^"{{}}\[\]{MARKS}]*+')
_SCALAR = re.compile(r"[\w.+-]*")


def read_json(source: TextSource, sink: Sink) -> Steps[None]:
    """Hand a JSON value on as it comes, up to its end. Brackets and strings are followed, nothing else.

    In a string every marker is text. Raises Unreadable at a marker elsewhere, and at the end of the text.
    """
    yield from source.skip_space()
    if (yield from source.peek()) not in ("{", "[", '"'):
        word = yield from source.read_word(_SCALAR)
        sink(word)
        if not word:
            raise Unreadable
        return
    depth, in_string = 0, False
    while True:
        start = source.position
        try:
            depth, in_string, is_done = _scan(source, depth, in_string)
        finally:
            if source.position > start:
                sink(source.text[start : source.position])
        if is_done:
            return
        if source.is_over():
            raise Unreadable
        yield from source.wait()


def read_json_text(source: TextSource) -> Steps[str]:
    """Read a JSON value whole."""
    pieces: list[str] = []
    yield from read_json(source, pieces.append)
    return "".join(pieces)


def read_json_string(source: TextSource) -> Steps[str]:
    """Read a JSON string; returns what it means."""
    yield from source.skip_space()
    if (yield from source.peek()) != '"':
        raise Unreadable
    value = decode_json((yield from read_json_text(source)))
    if not isinstance(value, str):
        raise Unreadable
    return value


def decode_json(text: str) -> object:
    """What a JSON text means. Raises Unreadable."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        pass
    try:  # which takes numbers of any size, and halves of surrogate pairs
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise Unreadable from None


def _refuse_constant(word: str) -> object:
    raise ValueError(word)


def is_json_object(text: str) -> bool:
    """Whether a text is a JSON object, every character of it looked at."""
    try:
        return isinstance(decode_json(text), dict)
    except Unreadable:
        return False


def _scan(source: TextSource, depth: int, in_string: bool) -> tuple[int, bool, bool]:
    """Move over what has come, up to the value's end; depth, whether in a string, whether it has ended."""
    text, place, end = source.text, source.position, len(source.text)
    while place < end:
        if in_string:
            place = _STRING_BODY.match(text, place).end()  # pyright: ignore[reportOptionalMemberAccess]
            if place == end or text[place] == "\\":
                break  # the rest of an escape has not come
            in_string = False
        else:
            place = _STRUCTURE.match(text, place).end()  # pyright: ignore[reportOptionalMemberAccess]
            if place == end:
                break
            match text[place]:
                case '"':
                    in_string = True
                case "{" | "[":
                    depth += 1
                case "}" | "]":
                    depth -= 1
                case _:
                    source.position = place
                    raise Unreadable
        place += 1
        if depth == 0 and not in_string:
            source.position = place
            return 0, False, True
    source.position = place
    return depth, in_string, False
