"""Values that are written as Python or with Gemma's braces, handed on as JSON while they come.

All that has come is read token by token without a generator, and its JSON is written at once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache

from .marked_text import MARKS
from .text_source import MAX_WORD, Steps, Stop, TextSource, Unreadable
from .tool_call import JsonWriter, to_json

_MAX_DEPTH = 64
_NO_WORD = rf"\s,:=()\[\]{{}}'\"<>{MARKS}"
_WORD = re.compile(f"[^{_NO_WORD}]*")
_CONSTANTS = {"True": "true", "False": "false", "None": "null"} | {
    word: word for word in ("true", "false", "null")
}
_NUMBER = re.compile(r"([+-]?)([0-9]*)(\.[0-9]*)?([eE][+-]?[0-9]+)?")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}
_ITSELF = {character: character for character in "\\'\""}
_JSON_ESCAPES = {kind: to_json(text)[1:-1] for kind, text in (_ESCAPES | _ITSELF).items()}
_HEX_DIGITS = re.compile("[0-9a-fA-F]*")
_CODE_LENGTHS = {"x": 2, "u": 4, "U": 8}


@dataclass(frozen=True, slots=True)
class _Place:
    """A place among tokens. before: what is written before the value or key that may stand here."""

    takes_value: bool = False
    takes_key: bool = False
    may_close: bool = False
    before: str = ""


_VALUE, _ELEMENT, _KEY = (
    _Place(takes_value=True),
    _Place(takes_value=True, may_close=True),
    _Place(takes_key=True, may_close=True),
)
_NEXT_ELEMENT, _NEXT_KEY = replace(_ELEMENT, before=", "), replace(_KEY, before=", ")
_AFTER_KEY, _AFTER_VALUE = _Place(), _Place(may_close=True)


@dataclass(frozen=True, slots=True)
class _Bracket:
    """What stands between brackets. first, following: of its items. assignment: after a key."""

    close: str
    json_open: str
    json_close: str
    first: _Place
    following: _Place
    assignment: str = ""


_BRACKETS = {
    "[": _Bracket("]", "[", "]", _ELEMENT, _NEXT_ELEMENT),
    "{": _Bracket("}", "{", "}", _KEY, _NEXT_KEY, ":"),
}
_TUPLE = _Bracket(")", "[", "]", _ELEMENT, _NEXT_ELEMENT)
_KEYWORDS = _Bracket(")", "{", "}", _KEY, _NEXT_KEY, "=")


class LiteralStyle:
    """How values are written.

    brackets: by what opens them. stops: by the quotes that texts stand within, what ends a run of characters.
    starts: what may become a quote, if more of the text comes. token: finds the next one behind white space.
    """

    def __init__(self, quotes: tuple[str, ...], is_python: bool) -> None:
        """is_python: texts have escapes, and tuples are lists."""
        self.brackets = {**_BRACKETS, "(": _TUPLE} if is_python else _BRACKETS
        self.stops = {quote: Stop([quote, "\\"] if is_python else [quote]) for quote in quotes}
        self.starts = {quote[:end] for quote in quotes for end in range(1, len(quote))}
        self.longest = max(map(len, quotes), default=0)
        plain = [quote for quote in quotes if quote in ("'", '"')]
        texts = "|".join(rf"{quote}[^\"'\\\x00-\x1f{MARKS}]++{quote}" for quote in plain) or "(?!)"
        begins = "|".join(map(re.escape, quotes)) or "(?!)"
        words = rf"(0|-?[1-9][0-9]*+)(?![^{_NO_WORD}])|([^{_NO_WORD}]++)"
        self.token = re.compile(rf"\s*+(?:([,:=])\s*+)?(?:([\[\](){{}}])|({texts})|({begins})|{words})?")


# Groups of `LiteralStyle.token`, which takes a separator with what follows it. _TEXT: a whole one.
_SEPARATOR, _BRACKET, _TEXT, _QUOTE, _INTEGER, _NAME = range(1, 7)


@lru_cache(16)
def load_style(*quotes: str, is_python: bool = False) -> LiteralStyle:
    """The style of texts within any of `quotes`, the longest first."""
    return LiteralStyle(quotes, is_python)


PYTHON = load_style('"""', "'''", '"', "'", is_python=True)


class LiteralReader:
    """Reads a value of a style from `source`, and writes it to `writer`."""

    def __init__(self, source: TextSource, writer: JsonWriter, style: LiteralStyle) -> None:
        self._source = source
        self._writer = writer
        self._style = style
        self._open: list[_Bracket] = []
        self._place = _VALUE
        self._quote = ""  # of the text that is open

    def read_value(self) -> Steps[None]:
        """Read the value. Raises Unreadable."""
        while not self._read_tokens():
            yield from self._source.wait()

    def read_keywords(self) -> Steps[None]:
        """Read what follows a keyword's "=", up to the bracket that closes them: the rest of an object."""
        self._open.append(_KEYWORDS)
        yield from self.read_value()
        self._source.position -= 1  # the bracket is the call's

    def read_word(self) -> Steps[str]:
        """Read a name; at least a character."""
        word = yield from self._source.read_word(_WORD)
        if not word or self._source.is_cut_off:  # it may be the beginning of another
            raise Unreadable
        return word

    def _read_tokens(self) -> bool:
        """Read as far as the text goes; whether the value has ended."""
        source, pieces = self._source, list[str]()
        try:
            while self._open or self._place is not _AFTER_VALUE:
                if source.position == len(source.text):
                    if source.is_over():
                        raise Unreadable
                    return False
                piece = self._read_text() if self._quote else self._read_token()
                if piece is None:
                    return False
                pieces.append(piece)
            return True
        finally:
            if json := "".join(pieces):
                self._writer.write(json)

    def _read_token(self) -> str | None:
        """JSON of the next token; None: more text has to come. Raises Unreadable."""
        source = self._source
        match = self._style.token.match(source.text, source.position)
        assert match is not None
        if match[_SEPARATOR]:
            self._take_separator(match)
        if match.lastindex == _BRACKET:
            json = self._take_bracket(match)
        elif self._may_go_on(match):
            return None
        else:
            json = self._take_item(match)
        source.position = match.end()
        return json

    def _take_separator(self, match: re.Match[str]) -> None:
        """Read a comma or what assigns. Raises Unreadable."""
        inner = self._open[-1] if self._open else None
        if inner and self._place is _AFTER_VALUE and match[_SEPARATOR] == ",":
            self._place = inner.following
        elif inner and self._place is _AFTER_KEY and match[_SEPARATOR] == inner.assignment:
            self._place = _VALUE
        else:
            self._source.position = match.start(_SEPARATOR)
            raise Unreadable

    def _may_go_on(self, match: re.Match[str]) -> bool:
        """Whether an item, or what may become one, is perhaps not whole. Raises Unreadable if it is none."""
        source, place, text = self._source, self._place, self._source.text
        kind, end = match.lastindex or _SEPARATOR, match.end()
        has_item = kind != _SEPARATOR
        source.position = start = match.start(kind) if has_item else end
        if start < len(text) and not (place.takes_value or place.takes_key):
            raise Unreadable
        if kind >= _INTEGER:
            if end - start > MAX_WORD:
                raise Unreadable
            if end < len(text):
                return False
        elif start < len(text) and text[start : start + self._style.longest] not in self._style.starts:
            if has_item:
                return False
            raise Unreadable
        if not source.is_over():
            return True
        if has_item and not source.is_cut_off:
            return False
        raise Unreadable

    def _take_bracket(self, match: re.Match[str]) -> str:
        """JSON of a bracket. Raises Unreadable."""
        sign, place = match[_BRACKET], self._place
        inner = self._open[-1] if self._open else None
        if inner and sign == inner.close and place.may_close:
            self._open.pop()
            self._place = _AFTER_VALUE
            return inner.json_close
        bracket = self._style.brackets.get(sign)
        if bracket is None or not place.takes_value or len(self._open) > _MAX_DEPTH:
            self._source.position = match.start(_BRACKET)
            raise Unreadable
        self._open.append(bracket)
        self._place = bracket.first
        return place.before + bracket.json_open

    def _take_item(self, match: re.Match[str]) -> str:
        """JSON of a value or a key, or of what begins one. Raises Unreadable."""
        kind, place, word = match.lastindex, self._place, match[match.lastindex or 0]
        if kind == _QUOTE:
            self._quote = word
            return place.before + '"'
        json = f'"{word[1:-1]}"' if kind == _TEXT else ""
        if place.takes_key:
            self._place = _AFTER_KEY
            return f"{place.before}{json or to_json(word)}: "
        json = word if kind == _INTEGER else json or to_scalar(word)
        self._place = _AFTER_VALUE
        return place.before + json

    def _read_text(self) -> str | None:
        """JSON of more of a text, or of its end; None: more has to come. Raises Unreadable."""
        source = self._source
        text, start = source.text, source.position
        stop = self._style.stops[self._quote]
        match = stop.pattern.search(text, start)
        if match is None:
            end = len(text) if source.is_finished else len(text) - stop.measure_held(text, start)
            source.position = end
            return self._writer.to_text(text[start:end]) if end > start else None
        source.position = match.start()
        if source.position > start:
            return self._writer.to_text(text[start : source.position])
        if match[0] != self._quote:
            return self._read_escape()
        source.position = match.end()
        self._quote = ""
        is_key = self._place.takes_key
        self._place = _AFTER_KEY if is_key else _AFTER_VALUE
        return '": ' if is_key else '"'

    def _read_escape(self) -> str | None:
        """JSON of a backslash and what follows; None: more has to come. Raises Unreadable."""
        source = self._source
        text, place = source.text, source.position + 2
        kind = text[place - 1 : place]
        length = _CODE_LENGTHS.get(kind, 0)
        digits = _HEX_DIGITS.match(text, place, place + length)
        end = digits.end() if digits else place
        if (not kind or (end - place < length and end == len(text))) and not source.is_over():
            return None
        source.position = min(end, len(text))
        if not kind:
            raise Unreadable
        if kind in _JSON_ESCAPES:
            return _JSON_ESCAPES[kind]
        code = int(text[place:end], 16) if 0 < length == end - place else 0x110000
        if code > 0x10FFFF:
            return self._writer.to_text(text[place - 2 : end])
        is_single = code < 0x10000  # halves of a pair stay as they are: JSON has them too
        return f"\\u{code:04x}" if is_single else to_json(chr(code))[1:-1]


def to_scalar(word: str) -> str:
    """JSON of a constant or number. Raises Unreadable."""
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    number = _NUMBER.fullmatch(word.replace("_", ""))
    sign, whole, fraction, exponent = number.groups("") if number else ("", "", "", "")
    if not whole and len(fraction) < 2:
        raise Unreadable
    return f"{sign.strip('+')}{whole.lstrip('0') or '0'}{fraction if len(fraction) > 1 else ''}{exponent}"
