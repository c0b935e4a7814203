"""JSON as a model writes it: its extent is found while it comes, its text goes on unchanged."""

from __future__ import annotations

import json
import re

import msgspec

from .marked_text import MARKS
from .text_source import Sink, Steps, TextSource, Unreadable

# What strings hold within either quote up to an escape whose rest has not come, and what of it JSON writes
# otherwise, behind the escapes that JSON has.
_REST = r"(?:u(?![0-9a-fA-F]{0,3}\Z)|[^u])"
_BODIES = {quote: re.compile(rf"[^{quote}\\]*+(?:\\{_REST}[^{quote}\\]*+)*+") for quote in "\"'"}
_ESCAPE = r"\\(?:[\"\\/bfnrt']|u[0-9a-fA-F]{4})"
_UNLIKE = {'"': re.compile(rf"{_ESCAPE}|[\x00-\x1f\\]"), "'": re.compile(rf"{_ESCAPE}|[\x00-\x1f\\\"]")}
_STRUCTURE = re.compile(rf"[^\"'{{}}\[\]TFN{MARKS}]*+")
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_SCALAR = re.compile(r"[\w.+-]*")


def read_json(source: TextSource, sink: Sink) -> Steps[None]:
    """Hand a JSON value on as it comes, up to its end. Brackets and strings are followed, nothing else.

    Some models write Python's constants and quotes, which become JSON's, and control characters and lone
    backslashes in strings, which are escaped. In a string every marker is text. Raises Unreadable at a marker
    elsewhere, and at the end of the text.
    """
    yield from source.skip_space()
    if (yield from source.peek()) not in ("{", "[", '"', "'"):
        word = yield from source.read_word(_SCALAR)
        sink(word)
        if not word:
            raise Unreadable
        return
    depth, quote = 0, ""
    while True:
        pieces: list[str] = []
        try:
            depth, quote, is_done = _scan(source, depth, quote, pieces.append)
        finally:
            if read := "".join(pieces):
                sink(read)
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
    if (yield from source.peek()) not in ('"', "'"):
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


def _scan(source: TextSource, depth: int, quote: str, sink: Sink) -> tuple[int, str, bool]:
    """Move over what has come, up to the value's end; depth, the open string's quote, whether that was it."""
    text, end = source.text, len(source.text)
    while (place := source.position) < end:
        match = (_BODIES[quote] if quote else _STRUCTURE).match(text, place)
        source.position = stop = match.end() if match else place
        sink(_UNLIKE[quote].sub(_escape, text[place:stop]) if quote else text[place:stop])
        if stop == end or (quote and text[stop] == "\\"):
            break  # the rest of an escape has not come
        sign = text[stop]
        if sign in "TFN":
            word = next((word for word in _CONSTANTS if word.startswith(text[stop : stop + len(word)])), sign)
            if len(word) > end - stop and not source.is_finished:
                break
            sink(_CONSTANTS.get(text[stop : stop + len(word)], text[stop : stop + len(word)]))
            source.position = min(end, stop + len(word))
            continue
        match sign:
            case '"' | "'":
                quote = "" if quote else sign
            case "{" | "[":
                depth += 1
            case "}" | "]":
                depth -= 1
            case _:
                raise Unreadable
        sink('"' if sign == "'" else sign)
        source.position = stop + 1
        if depth == 0 and not quote:
            return 0, "", True
    return depth, quote, False


def _escape(match: re.Match[str]) -> str:
    text = match[0]
    if len(text) > 1:
        return text if text[1] != "'" else "'"
    return json.dumps(text)[1:-1]
