"""Prints a turn while it is generated. The answer goes to standard output, so that a pipe gets nothing else;
thoughts, tool calls and their results go to standard error.
"""

from __future__ import annotations

import os
import sys
from typing import TextIO

from ..output_formats.events import (
    AssistantMessage,
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class AnswerPrinter:
    """Takes a turn's events; what is not the answer is dimmed where the terminal can do that."""

    def __init__(self) -> None:
        self._dims = can_dim(sys.stderr)
        self._open: TextIO | None = None  # the stream in which a line has begun

    def take(self, event: OutputEvent) -> None:
        """Print an event."""
        match event:
            case TextDelta(text):
                self._begin(sys.stdout)
                print(text, end="", flush=True)
            case ReasoningDelta(text):
                self._think(text)
            case ToolCallStart(_, _, name):
                self.end_line()
                self._print_beside(f"-> {name} ")
            case ToolCallDelta(_, arguments):
                self._print_beside(arguments)
            case ToolCallEnd():
                self.end_line()

    def end_message(self, message: AssistantMessage) -> None:
        """End the last line; an answer without a text is an empty line."""
        if self._open is None and not message.tool_calls:
            self._open = sys.stdout
        self.end_line()

    def show_result(self, text: str) -> None:
        """Print what a call gave."""
        self.note(f"<- {text}")

    def note(self, text: str) -> None:
        """Print a line beside the answer."""
        self.end_line()
        self._print_beside(text)
        self.end_line()

    def end_line(self) -> None:
        """Whatever comes next begins a line."""
        if self._open is not None:
            print(file=self._open, flush=True)
            self._open = None

    def _think(self, text: str) -> None:
        if self._open is not sys.stderr:
            text = text.lstrip("\n")
            if not text:
                return
            if not self._dims:
                text = f"(thinking) {text}"
        self._print_beside(text)

    def _print_beside(self, text: str) -> None:
        self._begin(sys.stderr)
        print(f"{_DIM}{text}{_PLAIN}" if self._dims else text, end="", file=sys.stderr, flush=True)

    def _begin(self, stream: TextIO) -> None:
        if self._open is not stream:
            self.end_line()
            self._open = stream


def can_dim(stream: TextIO) -> bool:
    """Whether a stream is a terminal that knows colours, and its user wants them (no-color.org)."""
    return stream.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")
