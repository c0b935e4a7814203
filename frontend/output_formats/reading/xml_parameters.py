"""Arguments between tags: texts are handed on as they come, other values when their tag is closed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..output_format import CallFormat
from ..schema_types import list_types, resolve, type_of
from .json_text import decode_json
from .literals import PYTHON, LiteralReader
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
            found = yield from read_until(self._value_stop, writer.write_text, self._trail)
            if found:
                writer.write('"')
        else:
            pieces: list[str] = []
            found = yield from read_until(self._value_stop, pieces.append, self._trail)
            if found:
                writer.write(convert_value(writer.restore("".join(pieces)), types))
        if not found:
            raise Unreadable


def convert_value(text: str, types: frozenset[str]) -> str:
    """JSON of a parameter's text, of one of the types if it can be read so, else a string."""
    word = text.strip()
    for reading in _READINGS:
        candidate = reading(word)
        try:
            found = type_of(decode_json(candidate)) if candidate else ""
        except Unreadable:
            continue
        if found in types or (found == "integer" and "number" in types):
            return candidate
        if found == "number" and "integer" in types and float(word).is_integer():
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
