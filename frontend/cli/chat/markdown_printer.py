"""Paints an answer's Markdown on a terminal while it comes. Loads rich, and is loaded only to do so.

A block that can change no more is printed for good; the last one is painted again and again, of a long one
as much as the screen has room for.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from typing import Any, ClassVar, TextIO

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Heading, Markdown
from rich.segment import Segment, Segments
from rich.text import Text
from rich.theme import Theme

_FENCE = re.compile(r" {0,3}(`{3,}(?=[^`]*$)|~{3,})")
_PAUSE = 5  # times the cost of a paint, until the next
_MAX_WIDTH = 120  # columns; longer lines are hard to read
# rich's own have a black background, centred titles and colours that say what nothing else does
_THEME = Theme(
    {
        "markdown.code": "cyan",
        "markdown.h1": "bold underline",
        "markdown.h2": "bold underline",
        "markdown.h3": "bold",
        "markdown.hr": "dim",
    }
)
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"]).disable("image")


class _LeftHeading(Heading):
    LEVEL_ALIGN: ClassVar[dict[str, Any]] = {}


class _Answer(Markdown):
    """Line breaks are kept, HTML and images are text: whatever the model has written is shown."""

    elements: ClassVar[dict[str, Any]] = {**Markdown.elements, "heading_open": _LeftHeading}

    def __init__(self, markup: str) -> None:
        super().__init__("", code_theme="ansi_dark", hyperlinks=False)
        self.parsed = _PARSER.parse(markup)
        for token in self.parsed:
            for child in token.children or ():
                if child.type == "softbreak":
                    child.type = "hardbreak"


class _Block:
    """A block without empty lines at both ends; while it grows, the last lines that fit on the screen."""

    def __init__(self, text: str, is_whole: bool) -> None:
        self._text, self._is_whole = text, is_whole

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        options = options.update(width=max(1, min(options.max_width - 1, _MAX_WIDTH)))
        lines: list[list[Segment]] = []
        with contextlib.suppress(Exception):  # a fault of the renderer is not to cost the answer
            lines = _cut(console.render_lines(_Answer(self._text), options, pad=False))
        if not lines:  # nor is a quote in a window that is too narrow for one
            lines = _cut(console.render_lines(Text(self._text), options, pad=False))
        if not self._is_whole:
            lines = lines[-max(1, console.height - 1) :]
        yield Segments([part for line in lines for part in (*line, Segment.line())][:-1])


def _cut(lines: list[list[Segment]]) -> list[list[Segment]]:
    """Without empty lines at both ends, and without blanks at lines' ends, which a user would copy along."""
    lines = [_cut_line(line) for line in lines]
    shown = [number for number, line in enumerate(lines) if line]
    return lines[shown[0] : shown[-1] + 1] if shown else []


def _cut_line(line: list[Segment]) -> list[Segment]:
    while line and not line[-1].text.rstrip():
        line = line[:-1]
    return [*line[:-1], Segment(line[-1].text.rstrip(), line[-1].style)] if line else []


class MarkdownPrinter:
    """`write` what comes, `end` when it is all. Prints to `file`, a terminal."""

    def __init__(
        self,
        file: TextIO,
        has_color: bool,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """console: of another size or terminal, for tests."""
        self._console = console or Console(
            file=file, force_terminal=True, no_color=not has_color, theme=_THEME, highlight=False
        )
        self._clock = clock
        self._text = ""  # of blocks that may change
        self._live: Live | None = None  # paints the last of them, once there is something to see
        self._needs_gap = False  # an empty line, before what is printed next
        self._next_paint_at = 0.0

    def write(self, text: str) -> None:
        """Take what comes next, and paint if it is time to."""
        self._text += text
        began = self._clock()
        if began < self._next_paint_at:
            return
        self._print_blocks()
        self._paint(self._text, is_whole=False)
        now = self._clock()
        self._next_paint_at = now + _PAUSE * (now - began)

    def end(self) -> None:
        """Print what is left; the cursor stands at the beginning of a line."""
        self._print_blocks()
        self._finish(self._text)
        self._text = ""

    def _print_blocks(self) -> None:
        while length := find_block_end(self._text):
            block, self._text = self._text[:length], self._text[length:]
            self._finish(block)

    def _finish(self, block: str) -> None:
        """Print a block for good."""
        self._paint(block, is_whole=True)
        if self._live is not None:
            self._live.stop()
            self._live, self._needs_gap = None, True

    def _paint(self, block: str, is_whole: bool) -> None:
        """Have the screen show `block` in the place of what was painted last."""
        if self._live is None:
            if not block.strip():
                return
            if self._needs_gap:
                self._console.line()
            self._live = Live(
                console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
            )
            self._live.start()
        self._live.update(_Block(block, is_whole), refresh=not is_whole)


def find_block_end(text: str) -> int:
    """How long the first block of `text` is, which nothing behind it changes; 0 while it may still grow.

    It ends at an empty line before one that is not indented, outside of a fence.
    """
    fence, place, was_blank = "", 0, False
    for line in text.splitlines(keepends=True):
        if not fence and was_blank and place and line.strip() and not line[0].isspace():
            return place
        if fence:
            if line.strip().startswith(fence) and not line.strip().strip(fence[0]):
                fence = ""
        elif found := _FENCE.match(line.rstrip("\n")):
            fence = found[1]
        was_blank = not line.strip()
        place += len(line)
    return 0
