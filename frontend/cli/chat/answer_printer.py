"""Prints an answer while it is generated: the text to standard output, thoughts to standard error."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, NamedTuple, TextIO

from ... import events as turn
from ..streams import show_controls

if TYPE_CHECKING:  # it loads rich
    from .markdown_printer import MarkdownPrinter

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class AnswerStyle(NamedTuple):
    """How answers are printed."""

    has_color: bool = False  # dimmed thoughts, coloured Markdown
    is_markdown: bool = False


class AnswerPrinter:
    """Takes a turn's events; what is not the answer is dimmed where the terminal can do that."""

    def __init__(self, style: AnswerStyle | None = None) -> None:
        self._style = style or AnswerStyle()
        self._stream: TextIO | None = None  # in which
        self._markdown: MarkdownPrinter | None = None
        if self._style.is_markdown:
            from .markdown_printer import MarkdownPrinter

            self._markdown = MarkdownPrinter(sys.stdout, self._style.has_color)

    def take(self, event: turn.OutputEvent) -> None:
        """Print what an event brings, at once."""
        match event:
            case turn.TextDelta(text):
                self._begin(sys.stdout)
                shown = show_controls(text, sys.stdout)
                if self._markdown is None:
                    print(shown, end="", flush=True)
                else:
                    self._markdown.write(shown)
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
        self._print_beside(text)
        self.end_line()

    def end_line(self) -> None:
        """Whatever comes next begins a line."""
        if self._stream is sys.stdout and self._markdown is not None:
            self._markdown.end()
        elif self._stream is not None:
            print(file=self._stream, flush=True)
        self._stream = None

    def _think(self, text: str) -> None:
        if self._stream is not sys.stderr:
            text = text.lstrip("\n")
            if not text:
                return
            if not self._style.has_color:
                text = f"(thinking) {text}"
        self._print_beside(text)

    def _print_beside(self, text: str) -> None:
        self._begin(sys.stderr)
        text = show_controls(text, sys.stderr)
        shown = f"{_DIM}{text}{_PLAIN}" if self._style.has_color else text
        print(shown, end="", file=sys.stderr, flush=True)

    def _begin(self, stream: TextIO) -> None:
        if self._stream is not stream:
            self.end_line()
            self._stream = stream


def choose_style(color: str, is_markdown: bool) -> AnswerStyle:
    """color: 'auto' where the user's terminal knows colours and nobody has said no, 'always' or 'never'."""
    has_color = color == "always" or (color == "auto" and can_dim(sys.stderr))
    return AnswerStyle(has_color, is_markdown and sys.stdout.isatty() and os.environ.get("TERM") != "dumb")


def can_dim(stream: TextIO) -> bool:
    """Whether a stream is a terminal that knows colours, and its user wants them (no-color.org)."""
    return stream.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")
