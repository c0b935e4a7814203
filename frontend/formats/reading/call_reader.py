"""One call in any format: its name, and its arguments as JSON."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..offered_tools import list_types, resolve, type_of
from ..output_format import CallFormat
from .json_text import decode_json, read_json, read_json_string, read_json_text
from .lexicon import Lexicon
from .literals import PYTHON, LiteralReader, load_style
from .marked_text import MARKS
from .text_source import Steps, Stop, TextSource, Unreadable
from .tool_call import CallWriter, to_json

_MAX_LITERAL = 20_000  # characters of Python that are read at once: 10 ms
_CONSTANTS = {"true": "true", "false": "false", "null": "null", "none": "null"}


class ParameterReader:
    """Reads a call's parameters as `calls` describes them."""

    def __init__(self, source: TextSource, calls: CallFormat, split: Callable[[str], list[str]]) -> None:
        """split: cuts a marker into the pieces that it has in marked text."""
        self._source = source
        self._open = split(calls.parameter_open)
        self._values = split(calls.value_open)
        self._close = split(calls.parameter_close)
        # Templates put a text's line between tags: one line break belongs to each tag, others to the text.
        self._lead = "\n" if calls.value_open.endswith("\n") else ""
        self._trail = "\n" if calls.parameter_close.startswith("\n") else ""
        self._key_stop = Stop(self._values[:1])
        self._value_stop = Stop(self._close[:1])
        self._types: dict[tuple[int, str], frozenset[str]] = {}

    def read(self, writer: CallWriter) -> Steps[None]:
        """Read all parameters, and write the object that they are. Raises Unreadable."""
        source, before = self._source, "{"
        yield from source.skip_space()
        while (yield from source.accept_marker(self._open)):
            key: list[str] = []
            if not (yield from source.read_until(self._key_stop, key.append)):
                raise Unreadable
            name = writer.restore("".join(key).strip())
            writer.write(f"{before}{to_json(name)}: ")
            before = ", "
            if not (yield from source.accept_marker(self._values[1:])):
                raise Unreadable
            yield from source.accept(self._lead)
            yield from self._read_value(writer, self._find_types(writer.parameters, name))
            yield from source.accept_marker(self._close[1:])
        if source.is_cut_off:  # another parameter may have been to come
            raise Unreadable
        writer.write("{}" if before == "{" else "}")

    def _find_types(self, parameters: Mapping[str, Any], name: str) -> frozenset[str]:
        """The types of a parameter; looked for once, as an enum may be long."""
        properties = resolve(resolve(parameters, parameters).get("properties"), {})
        if name not in properties:
            return frozenset()
        key = id(parameters), name
        if key not in self._types:
            self._types[key] = list_types(properties[name], parameters)
        return self._types[key]

    def _read_value(self, writer: CallWriter, types: frozenset[str]) -> Steps[None]:
        read_until = self._source.read_until
        if types <= {"string"}:
            writer.write('"')
            marker = yield from read_until(self._value_stop, writer.write_text, self._trail)
            if marker:
                writer.write('"')
        else:
            pieces: list[str] = []
            marker = yield from read_until(self._value_stop, pieces.append, self._trail)
            if marker:
                writer.write(convert_value(writer.restore("".join(pieces)), types))
        if not marker:
            raise Unreadable


def convert_value(text: str, types: frozenset[str]) -> str:
    """JSON of a parameter's text, of one of the types if it can be read so, else a string."""
    word = text.strip()
    for reading in _READINGS:
        candidate = reading(word)
        try:
            kind = type_of(decode_json(candidate)) if candidate else ""
        except Unreadable:
            continue
        if kind in types or (kind == "integer" and "number" in types):
            return candidate
        if kind == "number" and "integer" in types and float(word).is_integer():
            return str(int(float(word)))
    return to_json(text)


def _convert_literal(text: str) -> str:
    """JSON of a list or an object that is written as Python; '' if it is none."""
    if text[:1] not in ("{", "[", "(") or len(text) > _MAX_LITERAL:
        return ""
    source, value = TextSource(), _Value()
    source.add(text, is_finished=True)
    try:
        for _ in LiteralReader(source, value, PYTHON).read_value():
            pass
    except Unreadable:
        return ""
    return value.json if source.position == len(text) else ""


class _Value:
    """A value that is written whole."""

    def __init__(self) -> None:
        self.json = ""

    def write(self, text: str) -> None:
        self.json += text

    def to_text(self, text: str) -> str:
        return to_json(text)[1:-1]


_READINGS: tuple[Callable[[str], str], ...] = (
    str,
    lambda word: _CONSTANTS.get(word.lower(), ""),
    _convert_literal,
)


_NAME = re.compile(rf"[^\s<>{{}}()\[\]\"'=,;{MARKS}]*")
_ARGUMENTS_KEYS = ("arguments", "parameters")  # models take either, whichever their template shows
_OTHER_KEYS = ("type", "id")


class CallReader:
    """Reads calls from `source`. All its readers raise Unreadable."""

    def __init__(self, source: TextSource, calls: CallFormat, lexicon: Lexicon) -> None:
        self._source = source
        self._format = calls
        self._section_open = lexicon.split(calls.section_open)
        self._open = lexicon.split(calls.open)
        self._name_close = lexicon.split(calls.name_close)
        self._call_id_open = lexicon.split(calls.call_id_open)
        self._separator = lexicon.split(calls.separator)
        self._section_close = lexicon.split(calls.section_close)
        self.close = lexicon.split(calls.close)
        self._parameters = ParameterReader(source, calls, lexicon.split) if calls.form == "xml" else None
        quotes = ("".join(lexicon.split(calls.quote)), '"') if calls.quote else ()
        self._style = PYTHON if calls.form == "python" else load_style(*quotes)

    def open_section(self, opener: str) -> Steps[bool]:
        """Read what comes before the first call, after `opener`; whether that has opened the call itself."""
        pieces = self._section_open
        if opener and opener in pieces[:1]:
            pieces = pieces[1:]
        elif opener and opener in self._open[:1]:
            return True
        if not (yield from self._source.accept_marker(pieces)):
            raise Unreadable
        return False

    def read_call(self, writer: CallWriter, is_opened: bool) -> Steps[bool]:
        """Read a call, whose first piece may be read. False if its arguments are no JSON object."""
        source = self._source
        rest = self._open[1:] if is_opened else self._open
        if not (yield from source.accept_marker(rest)):
            raise Unreadable
        if self._format.name_key is not None:
            yield from self._read_object(writer, self._format.name_key)
        else:
            yield from source.skip_space()
            name = yield from self._read_name(writer)
            yield from self._read_call_id(writer)
            yield from source.accept_marker(self._name_close)
            yield from source.skip_space()
            yield from self.read_arguments(writer, name)
        is_valid = writer.end()
        yield from self._read_close(self.close)
        return is_valid

    def has_next(self) -> Steps[bool]:
        """Whether a separator announces another call; reads it, or else what closes the calls.

        What is read for another call is kept.
        """
        source = self._source
        if not self._separator and not self._section_close:
            return False
        source.keep()
        if self._separator and (yield from source.accept_marker(self._separator)):
            return True
        source.forget()
        yield from self._read_close(self._section_close)
        return False

    def _read_close(self, pieces: Sequence[str]) -> Steps[None]:
        """Read what closes something, as far as the model writes it."""
        for piece in pieces:
            yield from self._source.skip_space()
            if not (yield from self._source.accept(piece)) and self._source.is_cut_off:
                self._source.skip_rest()  # its beginning

    def start_arguments(self, writer: CallWriter, name: str) -> None:
        """Tell a call's name. What was kept is needed no more."""
        writer.start(name)
        self._source.forget()

    def _read_name(self, writer: CallWriter) -> Steps[str]:
        name = yield from self._source.read_word(_NAME)
        if self._source.is_cut_off or not writer.is_offered(name):  # it may be the beginning of another
            raise Unreadable
        return name

    def _read_call_id(self, writer: CallWriter) -> Steps[None]:
        if self._call_id_open and (yield from self._source.accept_marker(self._call_id_open)):
            writer.call_id = (yield from self._source.read_word(_NAME)) or None

    def read_arguments(self, writer: CallWriter, name: str) -> Steps[None]:
        """Tell an offered name as soon as arguments begin as they should, and read them."""
        source = self._source
        if self._format.form == "python":
            yield from self._read_keywords(writer, name)
            return
        if self._parameters:
            self.start_arguments(writer, name)
            yield from self._parameters.read(writer)
            return
        if (yield from source.peek()) != "{":
            yield from self._start_empty(writer, name)
            return
        self.start_arguments(writer, name)
        if self._format.form == "json":
            yield from read_json(source, writer.write)
        else:
            yield from LiteralReader(source, writer, self._style).read_value()

    def _start_empty(self, writer: CallWriter, name: str) -> Steps[None]:
        """A call that ends without arguments has none."""
        if not self.close or not (yield from self._source.accept_marker(self.close)):
            raise Unreadable
        self.start_arguments(writer, name)
        writer.write("{}")

    def _read_keywords(self, writer: CallWriter, name: str) -> Steps[None]:
        source = self._source
        if (yield from source.peek()) == self.close[0][0]:
            self.start_arguments(writer, name)
            writer.write("{}")
            return
        values = LiteralReader(source, writer, self._style)
        key = yield from values.read_word()
        yield from source.expect("=")
        self.start_arguments(writer, name)
        writer.write(f"{{{to_json(key)}: ")
        yield from values.read_keywords()

    def _read_object(self, writer: CallWriter, name_key: str) -> Steps[None]:
        """Read a call that is an object. Its members may stand in any order; the name is told first."""
        source = self._source
        name, arguments = "", ""
        yield from source.expect("{")
        while True:
            yield from source.skip_space()
            if (yield from source.accept("}")):
                break
            key = yield from read_json_string(source)
            yield from source.expect(":")
            yield from source.skip_space()
            if key == name_key:
                name = yield from read_json_string(source)
                if not writer.is_offered(name):
                    raise Unreadable
            elif key in _ARGUMENTS_KEYS and not writer.is_started:
                if name and (yield from source.peek()) == "{":
                    self.start_arguments(writer, name)
                    yield from read_json(source, writer.write)
                else:
                    arguments = yield from self._read_early_arguments(writer)
            elif self._format.is_bare and key not in _OTHER_KEYS and not writer.is_started:
                raise Unreadable
            else:
                yield from read_json_text(source)
            yield from source.skip_space()
            if not (yield from source.accept(",")):
                yield from self._end_object(writer)
                break
        if not writer.is_started:
            if not name:
                raise Unreadable
            self.start_arguments(writer, name)
            writer.write(arguments or "{}")

    def _end_object(self, writer: CallWriter) -> Steps[None]:
        """Read an object's closing brace, which some models forget behind that of the arguments."""
        if writer.is_started:
            yield from self._source.accept("}")
        else:
            yield from self._source.expect("}")

    def _read_early_arguments(self, writer: CallWriter) -> Steps[str]:
        """Arguments that come before the name, or are a text or null, as JSON."""
        text = writer.restore((yield from read_json_text(self._source)))
        value = decode_json(text)
        if isinstance(value, str):
            text, value = value, decode_json(value)
        if value is not None and not isinstance(value, dict):
            raise Unreadable
        return "{}" if value is None else text
