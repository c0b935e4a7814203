"""One call in any format: its name, and its arguments as JSON."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...tools import Tool
from ..offered_tools import list_types, resolve, type_of
from ..output_format import CallFormat
from ..schemas.keywords import TYPES
from .json_text import decode_json, read_json, read_json_string, read_json_text
from .lexicon import Lexicon
from .literals import PYTHON, LiteralReader, load_style
from .marked_text import MARKS
from .text_source import Steps, Stop, TextSource, Unreadable
from .tool_call import CallWriter, to_json

_TEXT, _OBJECT = frozenset(["string"]), frozenset(["object"])
_WRAPPERS = ("arguments", "input", "parameters")  # models write all arguments as the value of one
_MAX_LITERAL = 20_000  # characters of Python that are read at once: 10 ms
_CONSTANTS = {"true": "true", "false": "false", "null": "null", "none": "null"}


class ParameterReader:
    """Reads a call's parameters as `calls` describes them."""

    def __init__(self, source: TextSource, calls: CallFormat, split: Callable[[str], list[str]]) -> None:
        """split: cuts a marker into the pieces that it has in marked text."""
        self._source = source
        self._open = split(calls.parameter_open)
        self._values = split(calls.value_open)
        self._json_values = split(calls.json_value_open)
        self._close = split(calls.parameter_close)
        self._closes_names = calls.value_open.startswith("</")
        self._call_open = split(calls.open)
        self._call_close = split(calls.close)
        self._after_call = (self._call_open, self._call_open[1:], split(calls.section_close))
        # Templates put a text's line between tags: one line break belongs to each tag, others to the text.
        self._lead = "\n" if calls.value_open.endswith("\n") else ""
        self._trail = "\n" if calls.parameter_close.startswith("\n") else ""
        self._key_stop = Stop(self._values[:1])
        # Models leave `parameter_close` out; then the next parameter or the call's end ends a value.
        self._value_stop = Stop([self._close[0], self._open[0], *self._call_close])
        self._types: dict[tuple[int, str], frozenset[str]] = {}

    def read(self, writer: CallWriter) -> Steps[None]:
        """Read all parameters, and write the object that they are. Raises Unreadable."""
        source, before = self._source, "{"
        yield from source.skip_space()
        while (yield from source.accept_marker(self._open)) or (yield from self._comes_key(writer)):
            key: list[str] = []
            if not (yield from source.read_until(self._key_stop, key.append)):
                raise Unreadable
            name = writer.restore("".join(key).strip())
            properties = _find_properties(writer.parameters)
            if "<" in name and name not in properties:  # text that quotes the beginning of a call
                raise Unreadable
            types = yield from self._read_value_open(self._find_types(writer.parameters, name))
            if before == "{" and name in _WRAPPERS and properties and name not in properties:
                value = yield from self._read_converted(writer, _OBJECT)
                yield from source.accept_marker(self._close[1:])
                if value[0] == "{" and not (yield from source.comes(self._open)) and not source.is_cut_off:
                    writer.write(value)
                    return
                writer.write(f"{before}{to_json(name)}: {value}")
            else:
                writer.write(f"{before}{to_json(name)}: ")
                yield from self._read_value(writer, types)
                yield from source.accept_marker(self._close[1:])
            before = ", "
        if source.is_cut_off:  # another parameter may have been to come
            raise Unreadable
        writer.write("{}" if before == "{" else "}")

    def _comes_key(self, writer: CallWriter) -> Steps[bool]:
        """Whether the name of a parameter comes next, whose `parameter_open` is missing; reads nothing."""
        if not self._closes_names or self._source.is_cut_off:
            return False
        source = self._source
        yield from source.skip_space()
        source.keep()
        key = yield from source.read_word(_NAME)
        is_key = key in _find_properties(writer.parameters) and (yield from source.comes(self._values[:1]))
        source.rewind()
        return is_key

    def cut_name(self, name: str, tools: Mapping[str, Tool]) -> Steps[str]:
        """The tool that `name` begins with, if the name of a parameter is its rest, as in `_comes_key`."""
        if self._closes_names and (yield from self._source.comes(self._values[:1])):
            for tool in tools.values():
                rest = name.removeprefix(tool.name)
                if rest != name and rest in _find_properties(tool.parameters or {}):
                    return tool.name
        return name

    def _read_value_open(self, types: frozenset[str]) -> Steps[frozenset[str]]:
        """Read the rest of what opens a value, which may say whether that is a text; the value's types."""
        source = self._source
        if (yield from source.accept_marker(self._values[1:])):
            types = _TEXT if self._json_values and "string" in types else types
        elif (yield from source.accept_marker(self._json_values[1:])):
            types = types or frozenset(TYPES)
        elif self._json_values:
            yield from source.accept(">")
        yield from source.accept(self._lead)
        return types

    def comes_next(self) -> Steps[bool]:
        """Whether a parameter comes next, or the end of a call without any; reads nothing."""
        source = self._source
        return (yield from source.comes(self._open[:1])) or (yield from source.comes(self._call_close[:1]))

    def _find_types(self, parameters: Mapping[str, Any], name: str) -> frozenset[str]:
        """The types of a parameter; looked for once, as an enum may be long."""
        properties = _find_properties(parameters)
        if name not in properties:
            return frozenset()
        key = id(parameters), name
        if key not in self._types:
            self._types[key] = list_types(properties[name], parameters)
        return self._types[key]

    def _read_value(self, writer: CallWriter, types: frozenset[str]) -> Steps[None]:
        if types <= {"string"}:
            writer.write('"')
            yield from self._read_text(writer.write_text, writer.parameters)
            writer.write('"')
        else:
            writer.write((yield from self._read_converted(writer, types)))

    def _read_converted(self, writer: CallWriter, types: frozenset[str]) -> Steps[str]:
        pieces: list[str] = []
        yield from self._read_text(pieces.append, writer.parameters)
        return convert_value(writer.restore("".join(pieces)), types)

    def _read_text(self, sink: Callable[[str], None], parameters: Mapping[str, Any]) -> Steps[None]:
        """Hand a value's text on, and read what closes it if it is there. Raises Unreadable."""
        source = self._source
        while marker := (yield from source.read_until(self._value_stop, sink, "\n")):
            space = source.dropped_space
            if marker == self._close[0]:
                if space and not self._trail:
                    sink(space)
                return
            source.keep(len(marker))
            is_end = yield from self._ends_value(marker, bool(space), parameters)
            source.rewind()
            if is_end:
                return
            sink(space + marker)
            source.position += len(marker)
        raise Unreadable

    def _ends_value(self, marker: str, is_line: bool, parameters: Mapping[str, Any]) -> Steps[bool]:
        """Whether a marker within a value is no text: what follows says so. Reads on.

        is_line: a line begins with it, as in templates. A text may quote a call on its lines.
        """
        source, closes = self._source, self._call_close
        if marker == self._open[0]:
            if not (yield from source.accept_marker(self._open[1:])):
                return False
            key = yield from source.read_word(_NAME)
            properties = _find_properties(parameters)
            is_known = key in properties or (not properties and bool(key))
            return is_known and (yield from source.accept_marker(self._values[:1]))
        rest = closes[closes.index(marker) + 1 :]
        is_sure = is_line or len(marker) == 1  # a token
        for pieces in (rest, *self._after_call) if is_sure else (rest,):
            if pieces and (yield from source.accept_marker(pieces)):
                return True
        return (yield from source.comes_end())


def _find_properties(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return resolve(resolve(parameters, parameters).get("properties"), {})


def convert_value(text: str, types: frozenset[str]) -> str:
    """JSON of a parameter's text, of one of the types if it can be read so, else a string."""
    word = text.strip()
    for reading in _READINGS:
        candidate = reading(word)
        try:
            value = decode_json(candidate) if candidate else None
            kind = type_of(value) if candidate else ""
        except Unreadable:
            continue
        if kind in types or (kind == "integer" and "number" in types):
            return candidate
        if kind == "number" and "integer" in types and float(word).is_integer():
            return str(int(float(word)))
        if isinstance(value, str) and word[:1] == '"' and "string" not in types:  # a number in quotes
            return convert_value(value, types)
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
_FENCE = "```"
_LANGUAGE = re.compile(r"[a-z_]*")
# As OpenAI's namespace has it, and as Kimi numbers its calls.
_LONG_NAME = re.compile(r"(?:call)?:?(?:functions\.)?([\w-]+)(?::[0-9]+)?")


def _shorten(name: str, writer: CallWriter) -> str:
    """A name without what models write around it, unless a tool has all of it."""
    match = None if writer.is_offered(name) else _LONG_NAME.fullmatch(name)
    return match[1] if match else name


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
        self._lead_close = lexicon.split(calls.lead.replace("<", "</", 1))
        self.close = lexicon.split(calls.close)
        self._parameters = ParameterReader(source, calls, lexicon.split) if calls.form == "xml" else None
        quotes = ("".join(lexicon.split(calls.quote)), '"') if calls.quote else ()
        self._style = PYTHON if calls.form == "python" else load_style(*quotes)
        self.call_ids: frozenset[str] = frozenset()  # those that the model wrote
        # What stands around objects, beside markers: a list, a block of Markdown.
        self._is_list = self._is_fenced = False

    def open_section(self, opener: str, is_unmarked: bool) -> Steps[None]:
        """Read what comes before the first call, after `opener`.

        is_unmarked: the markers before `bare_open` are missing.
        """
        self._is_list = self._is_fenced = False
        if opener:
            yield from self._skip_markers([opener, *self._section_open])  # some write it twice
        elif is_unmarked and self._format.form != "python":
            return
        elif not (yield from self._source.accept_marker(self._section_open)) and not (
            self._format.form == "python" and (yield from self._source.comes(["{"]))
        ):
            raise Unreadable

    def read_call(self, writer: CallWriter, is_unmarked: bool) -> Steps[bool]:
        """Read a call. False if its arguments are no JSON object.

        is_unmarked: only its beginning says that it is a call, so that has to be exact.
        """
        if is_unmarked and self._format.name_key is None:
            if not (yield from self._source.accept_marker(self._open[1:])):
                raise Unreadable
        else:
            yield from self._skip_markers(self._open)
        if (yield from self._comes_object()):
            yield from self._read_object(writer, self._format.name_key or "name", is_unmarked)
        else:
            yield from self._read_named(writer, is_unmarked)
        is_valid = writer.end()
        yield from self._read_close(self.close)
        return is_valid

    def _read_named(self, writer: CallWriter, is_unmarked: bool) -> Steps[None]:
        """Read a call whose name stands before its arguments."""
        source = self._source
        yield from source.skip_space()
        name = yield from self._read_name(writer, is_unmarked)
        yield from self._read_call_id(writer)
        is_closed = yield from source.accept_marker(self._name_close)
        if is_unmarked and not is_closed:
            raise Unreadable
        yield from source.skip_space()
        if is_unmarked and self._parameters and not (yield from self._parameters.comes_next()):
            raise Unreadable
        yield from self.read_arguments(writer, name)

    def _comes_object(self) -> Steps[bool]:
        """Whether a call is an object, which may be in a list and in a block of Markdown; reads up to it."""
        source = self._source
        yield from source.skip_space()
        if self._format.form == "python":
            return (yield from source.peek()) == "{"
        is_fenced = yield from self._read_fence()
        is_list = not self._is_list and (yield from source.accept("["))
        self._is_list = self._is_list or is_list
        yield from source.skip_space()
        if (yield from source.peek()) == "{":
            return True
        if is_fenced or is_list:
            raise Unreadable
        return False

    def _read_fence(self) -> Steps[bool]:
        """Whether a block of Markdown is opened; reads that."""
        is_fenced = yield from self._source.accept(_FENCE)
        if is_fenced:
            self._is_fenced = True
            yield from self._source.read_word(_LANGUAGE)
            yield from self._source.skip_space()
        return is_fenced

    def has_next(self) -> Steps[bool]:
        """Whether a separator announces another call; reads it, or else what closes the calls.

        What is read for another call is kept.
        """
        source = self._source
        separator = [","] if self._is_list else self._separator
        closes = self._section_close
        if self._is_list or self._is_fenced:
            closes = ["]"] * self._is_list + [_FENCE] * self._is_fenced + [*self.close, *closes]
        if not separator and not closes:
            return False
        source.keep()
        if separator and (yield from source.accept_marker(separator)):
            return True
        is_line = self._format.separator == "\n" and not self._open  # nothing else begins a call
        if is_line and not (yield from source.comes(closes)) and not (yield from source.comes_end()):
            return True
        source.forget()
        yield from self._read_close([*closes, *self._lead_close])
        return False

    def _skip_markers(self, pieces: Sequence[str]) -> Steps[None]:
        """Read those of a marker's pieces that the model writes."""
        for piece in pieces:
            yield from self._source.accept_marker([piece])

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

    def _read_name(self, writer: CallWriter, is_exact: bool) -> Steps[str]:
        source = self._source
        name = yield from source.read_word(_NAME)
        if source.is_cut_off:  # it may be the beginning of another
            raise Unreadable
        if name == "function" and not writer.is_offered(name) and not is_exact:
            # A type, as DeepSeek's older models write one.
            yield from self._skip_markers(self._name_close[:1])
            name = yield from source.read_word(_NAME)
        if self._parameters and not is_exact and not writer.is_offered(name):
            tool_name = yield from self._parameters.cut_name(name, writer.tools)
            source.position -= len(name) - len(tool_name)
            name = tool_name
        offered_name = name if is_exact else _shorten(name, writer)
        if source.is_cut_off or not writer.is_offered(offered_name):
            raise Unreadable
        if self._format.is_numbered:
            is_own = ":" in name and name not in self.call_ids
            writer.call_id = name if is_own else f"functions.{offered_name}:{len(self.call_ids)}"
            self.call_ids = self.call_ids | {writer.call_id}
        return offered_name

    def _read_call_id(self, writer: CallWriter) -> Steps[None]:
        if self._call_id_open and (yield from self._source.accept_marker(self._call_id_open)):
            writer.call_id = (yield from self._source.read_word(_NAME)) or None

    def read_arguments(self, writer: CallWriter, name: str) -> Steps[None]:
        """Tell an offered name as soon as arguments begin as they should, and read them."""
        source = self._source
        if self._format.form == "python":
            yield from self._read_keywords(writer, name)
            return
        if self._parameters and (yield from source.peek()) != "{":
            self.start_arguments(writer, name)
            yield from self._parameters.read(writer)
            return
        yield from self._skip_markers(self._open[1:][-1:])
        yield from self._read_fence()
        match (yield from source.peek()):
            case "{":
                self.start_arguments(writer, name)
                yield from self._read_members(writer)
            case '"':
                arguments = yield from self._read_early_arguments(writer)
                self.start_arguments(writer, name)
                writer.write(arguments)
            case _:
                yield from self._start_empty(writer, name)
                return
        if self._is_fenced:
            yield from self._read_close([_FENCE])

    def _read_members(self, writer: CallWriter) -> Steps[None]:
        """Read the object that arguments are."""
        if self._format.form == "braces":
            yield from LiteralReader(self._source, writer, self._style).read_value()
        else:
            yield from read_json(self._source, writer.write)

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

    def _read_object(self, writer: CallWriter, name_key: str, is_unmarked: bool) -> Steps[None]:
        """Read a call that is an object. Its members may stand in any order; the name is told first."""
        source = self._source
        is_strict = is_unmarked or self._format.is_bare
        yield from source.expect("{")
        name = (yield from self._read_first_name(writer, name_key)) if is_unmarked else ""
        arguments = ""
        while True:
            yield from source.skip_space()
            if (yield from source.accept("}")):
                break
            key = yield from read_json_string(source)
            yield from source.expect(":")
            yield from source.skip_space()
            if key == name_key:
                name = _shorten((yield from read_json_string(source)), writer)
                if not writer.is_offered(name):
                    raise Unreadable
            elif key in _ARGUMENTS_KEYS and not writer.is_started:
                if name and (yield from source.peek()) == "{":
                    self.start_arguments(writer, name)
                    yield from read_json(source, writer.write)
                else:
                    arguments = yield from self._read_early_arguments(writer)
            elif is_strict and key not in _OTHER_KEYS and not writer.is_started:
                raise Unreadable
            else:
                yield from read_json_text(source)
            yield from source.skip_space()
            if not (yield from source.accept(",")):
                yield from self._end_object(writer)
                break
        if not writer.is_started:
            if not name or (is_unmarked and not arguments):
                raise Unreadable
            self.start_arguments(writer, name)
            writer.write(arguments or "{}")

    def _read_first_name(self, writer: CallWriter, name_key: str) -> Steps[str]:
        """Read the members that an object without a marker has to begin with, and the comma behind."""
        source = self._source
        yield from source.accept_marker(['"type"', ":", '"function"', ","])
        if not (yield from source.accept_marker([f'"{name_key}"', ":", '"'])):
            raise Unreadable
        name = yield from source.read_word(_NAME)
        if not writer.is_offered(name) or not (yield from source.accept_marker(['"', ","])):
            raise Unreadable
        return name

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
            text = value if value.strip()[:2] != "{'" else _convert_literal(value.strip())
            value = decode_json(text or "{}")
        if value is not None and not isinstance(value, dict):
            raise Unreadable
        return "{}" if value is None else text or "{}"
