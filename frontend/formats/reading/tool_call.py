"""One call while it is read: what is told of it, and the JSON text of its arguments."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ...events import OutputEvent, ToolCallDelta, ToolCallEnd, ToolCallStart
from ...tools import Tool
from .json_text import is_json_object

_ENCODER = json.JSONEncoder(ensure_ascii=False)
_ALPHABET = string.ascii_letters + string.digits


def make_call_id(is_short: bool = False) -> str:
    """A new id for a call. is_short: nine letters and digits, all that Mistral's templates take."""
    if is_short:
        return "".join(secrets.choice(_ALPHABET) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"


class JsonWriter(Protocol):
    """Takes JSON piece by piece."""

    def write(self, text: str) -> None:
        """More JSON."""
        ...

    def to_text(self, text: str) -> str:
        """JSON of a piece of a string's inside, which is not written."""
        ...


class CallWriter:
    """Tells of one call. `write` takes JSON, `write_text` a piece of a string's inside.

    is_started: the name was told, so that the call cannot become text any more.
    """

    def __init__(
        self,
        index: int,
        tools: Mapping[str, Tool],
        restore: Callable[[str], str],
        emit: Callable[[OutputEvent], None],
        has_short_id: bool,
    ) -> None:
        self._index = index
        self.tools = tools
        self.restore = restore
        self._emit = emit
        self._has_short_id = has_short_id
        self._pieces: list[str] = []
        self.call_id: str | None = None
        self.is_started = False
        self.parameters: Mapping[str, Any] = {}  # the schema of the tool's arguments

    def is_offered(self, name: str) -> bool:
        """Whether a tool of this name may be called."""
        return name in self.tools

    def start(self, name: str) -> None:
        """Tell the name of an offered tool."""
        self.parameters = self.tools[name].parameters or {}
        self.is_started = True
        call_id = self.call_id or make_call_id(self._has_short_id)
        self._emit(ToolCallStart(self._index, call_id, name))

    def write(self, text: str) -> None:
        """More of the arguments' JSON."""
        text = self.restore(text)
        self._pieces.append(text)
        self._emit(ToolCallDelta(self._index, text))

    def to_text(self, text: str) -> str:
        """JSON of a piece of a string's inside."""
        return to_json(self.restore(text))[1:-1]

    def write_text(self, text: str) -> None:
        """More of a string within the arguments, as the string means it."""
        self.write(self.to_text(text))

    def end(self) -> bool:
        """Tell that the arguments are complete; False if they are no JSON object."""
        self._emit(ToolCallEnd(self._index))
        return is_json_object("".join(self._pieces))


def to_json(value: object) -> str:
    """JSON of a value, with characters as they are."""
    return _ENCODER.encode(value)
