"""Prints an answer while it is generated: the text to standard output, thoughts to standard error."""

from __future__ import annotations

import os
import sys
from typing import TextIO

from ... import events as turn
from ..streams import show_controls


class AnswerPrinter:
    """Takes a turn's events; what is not the answer is dimmed where the terminal can do that."""

    def __init__(self) -> None:
        self._stream: TextIO | None = None  # in which a line has begun
        self._dims = can_dim(sys.stderr)

    def take(self, event: turn.OutputEvent) -> None:
        """Print what an event brings, at once."""
        match event:
            case turn.TextDelta(text):
                self._print(text, sys.stdout)
            case turn.ReasoningDelta(text):
                self._think(text)
            case _:  # calls: no tools are offered
                pass

    def end_message(self) -> None:
        """End the last line; an answer without a text is an empty line."""
        self._stream = self._stream or sys.stdout
        self.end_line()

    def note(self, text: str) -> None:
        """Print a line beside the answer."""
        self.end_line()
        self._print(text, sys.stderr)
        self.end_line()

    def end_line(self) -> None:
        """Whatever comes next begins a line."""
        if self._stream is not None:
            print(file=self._stream, flush=True)
        self._stream = None

    def _think(self, text: str) -> None:
        if self._stream is not sys.stderr:
            text = text.lstrip("\n")
            if not text:
                return
            if not self._dims:
                text = f"(thinking) {text}"
        self._print(text, sys.stderr)

    def _print(self, text: str, stream: TextIO) -> None:
        if self._stream is not stream:
            self.end_line()
            self._stream = stream
        text = show_controls(text, stream)
        is_dimmed = self._dims and stream is sys.stderr
        print(f"\x1b[2m{text}\x1b[0m" if is_dimmed else text, end="", file=stream, flush=True)


def can_dim(stream: TextIO) -> bool:
    """Whether a stream is a terminal that knows colours, and its user wants them (no-color.org)."""
    return stream.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")
