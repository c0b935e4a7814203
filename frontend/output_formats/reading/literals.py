"""Values that are written as Python or with Gemma's braces, handed on as JSON while they come."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .marked_text import MARKS
from .text_source import Steps, Stop, TextSource, Unreadable
from .tool_call import JsonWriter, to_json

_MAX_DEPTH = 64
_WORD = re.compile(rf"[^\s,:=()\[\]{{}}'\"<>{MARKS}]*")
_CONSTANTS = {"True": "true", "False": "false", "None": "null"} | {
    word: word for word in ("true", "false", "null")
}
_NUMBER = re.compile(r"([+-]?)([0-9]*)(\.[0-9]*)?([eE][+-]?[0-9]+)?")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}
_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")
_CODE_LENGTHS = {"x": 2, "u": 4, "U": 8}


@dataclass(frozen=True)
class LiteralStyle:
    """quotes: what texts stand within. is_python: texts have escapes, and tuples are lists."""

    quotes: tuple[str, ...]
    is_python: bool

    def stop_at(self, quote: str) -> Stop:
        """What ends a run of characters in a text within `quote`."""
        return Stop([quote, "\\"] if self.is_python else [quote])


PYTHON = LiteralStyle(('"""', "'''", '"', "'"), is_python=True)


class LiteralReader:
    """Reads values of a style from `source`, and writes them to `writer`."""

    def __init__(self, source: TextSource, writer: JsonWriter, style: LiteralStyle) -> None:
        self._source = source
        self._writer = writer
        self._style = style

    def read_value(self, depth: int = 0) -> Steps[None]:
        """Read a value. Raises Unreadable."""
        source, is_python = self._source, self._style.is_python
        yield from source.skip_space()
        opening = yield from source.peek()
        if depth > _MAX_DEPTH:
            raise Unreadable
        if opening == "{":
            yield from self.read_object(depth + 1)
        elif opening == "[" or (opening == "(" and is_python):
            source.position += 1
            yield from self._read_list(")" if opening == "(" else "]", depth + 1)
        elif quote := (yield from self._accept_quote()):
            self._writer.write('"')
            yield from self._read_text(quote)
            self._writer.write('"')
        else:
            yield from self._read_scalar()

    def read_object(self, depth: int = 0) -> Steps[None]:
        """Read an object with its braces."""
        source, writer = self._source, self._writer
        yield from source.expect("{")
        writer.write("{")
        is_first = True
        while not (yield from self._accept("}")):
            if not is_first:
                yield from source.expect(",")
                if (yield from self._accept("}")):
                    break
                writer.write(", ")
            is_first = False
            yield from source.skip_space()
            quote = yield from self._accept_quote()
            if quote:
                writer.write('"')
                yield from self._read_text(quote)
                writer.write('": ')
            else:
                writer.write(to_json((yield from self.read_word())) + ": ")
            yield from source.expect(":")
            yield from self.read_value(depth)
        writer.write("}")

    def read_word(self) -> Steps[str]:
        """Read a name, number or constant; at least a character."""
        word = yield from self._source.read_word(_WORD)
        if not word or self._source.is_cut_off:  # it may be the beginning of another
            raise Unreadable
        return word

    def _read_scalar(self) -> Steps[None]:
        word = yield from self.read_word()
        scalar = to_scalar(word)
        if scalar is None:
            self._source.position -= len(word)
            raise Unreadable
        self._writer.write(scalar)

    def _read_list(self, close: str, depth: int) -> Steps[None]:
        self._writer.write("[")
        is_first = True
        while not (yield from self._accept(close)):
            if not is_first:
                yield from self._source.expect(",")
                if (yield from self._accept(close)):
                    break
                self._writer.write(", ")
            is_first = False
            yield from self.read_value(depth)
        self._writer.write("]")

    def _accept(self, literal: str) -> Steps[bool]:
        yield from self._source.skip_space()
        return (yield from self._source.accept(literal))

    def _accept_quote(self) -> Steps[str]:
        for quote in self._style.quotes:
            if (yield from self._source.accept(quote)):
                return quote
            if self._source.is_cut_off:  # it may be the beginning of this one
                raise Unreadable
        return ""

    def _read_text(self, quote: str) -> Steps[None]:
        stop = self._style.stop_at(quote)
        while (found := (yield from self._source.read_until(stop, self._writer.write_text, ""))) != quote:
            if not found:
                raise Unreadable
            yield from self._read_escape()

    def _read_escape(self) -> Steps[None]:
        """Read what follows a backslash, and write it as JSON."""
        source = self._source
        kind = yield from source.peek()
        if not kind:
            raise Unreadable
        source.position += 1
        if kind not in _CODE_LENGTHS:
            self._writer.write_text(_ESCAPES.get(kind, kind if kind in "\\'\"" else "\\" + kind))
            return
        digits = ""
        while len(digits) < _CODE_LENGTHS[kind]:
            digit = yield from source.peek()
            if digit not in _HEX_DIGITS:
                break
            digits += digit
            source.position += 1
        code = int(digits, 16) if len(digits) == _CODE_LENGTHS[kind] else 0x110000
        if code > 0x10FFFF:
            self._writer.write_text(f"\\{kind}{digits}")
            return
        is_single = code < 0x10000  # halves of a pair stay as they are: JSON has them too
        self._writer.write(f"\\u{code:04x}" if is_single else to_json(chr(code))[1:-1])


def to_scalar(word: str) -> str | None:
    """JSON of a constant or number; None for any other word."""
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    number = _NUMBER.fullmatch(word.replace("_", ""))
    if number is None:
        return None
    sign, whole, fraction, exponent = number.groups("")
    json = f"{sign.strip('+')}{whole.lstrip('0') or '0'}{fraction if len(fraction) > 1 else ''}{exponent}"
    return json if whole or len(fraction) > 1 else None
