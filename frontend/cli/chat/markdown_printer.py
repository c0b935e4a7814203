"""Paints an answer's Markdown on a terminal while it comes. Loads rich, and is loaded only to do so.

A block that can change no more is printed for good; the last one is painted again and again, as far as it is
on the screen. Lines that have scrolled away stay as they are.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TextIO

from markdown_it import MarkdownIt
from rich.cells import cell_len
from rich.console import Console
from rich.markdown import Heading, Markdown
from rich.text import Text
from rich.theme import Theme

_FENCE = re.compile(r" {0,3}(`{3,}(?=[^`]*$)|~{3,})")
_STYLE = re.compile(r"\x1b\[[0-9;]*m")
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


class Line(NamedTuple):
    """One line as it was printed, and how many columns it takes."""

    printed: str
    num_columns: int


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
        self._file = file
        self._console = console or Console(
            file=file, force_terminal=True, no_color=not has_color, theme=_THEME, highlight=False
        )
        self._clock = clock
        self._text = ""  # of blocks that may change
        self._lines: list[Line] = []  # of them, as they are on the screen and can be reached
        self._num_gone = 0  # lines of them above those
        self._needs_gap = False  # an empty line, before what is printed next
        self._next_paint_at = 0.0

    def write(self, text: str) -> None:
        """Take what comes next, and paint if it is time to."""
        self._text += text
        began = self._clock()
        if began < self._next_paint_at:
            return
        self._print_blocks()
        self._paint(self._text)
        self._file.flush()
        now = self._clock()
        self._next_paint_at = now + _PAUSE * (now - began)

    def end(self) -> None:
        """Print what is left; the cursor stands at the beginning of a line."""
        self._print_blocks()
        self._finish(self._text)
        self._text = ""
        self._file.flush()

    def _print_blocks(self) -> None:
        while length := find_block_end(self._text):
            block, self._text = self._text[:length], self._text[length:]
            self._finish(block)

    def _finish(self, block: str) -> None:
        """Print a block for good."""
        self._paint(block)
        if self._lines or self._num_gone:
            self._file.write("\n")
            self._needs_gap = True
        self._lines, self._num_gone = [], 0

    def _paint(self, block: str) -> None:
        """Have the lines on the screen show `block`; the cursor stays behind the last."""
        width, height = self._console.size
        width = max(1, min(width - 1, _MAX_WIDTH))
        lines = self._render(block, width)[self._num_gone :]
        pairs = zip(self._lines, lines, strict=False)
        num_same = next((number for number, (old, new) in enumerate(pairs) if old != new), len(lines))
        num_same = min(num_same, len(self._lines))
        if num_same == len(self._lines) == len(lines):
            return
        if num_same == len(lines) and lines:
            num_same -= 1  # shorter than before: the cursor is to stand behind the last
        changed = self._lines[num_same:]
        if changed:  # go back to the first of them, and write over it
            rows = sum(_count_rows(line, self._console.width) for line in changed)
            self._file.write("\r" + (f"\x1b[{rows - 1}A" if rows > 1 else ""))
        elif num_same or self._needs_gap:
            self._file.write("\n")
        self._needs_gap = False
        self._file.write("\n".join(f"{line.printed}\x1b[K" for line in lines[num_same:]))
        if changed:
            self._file.write("\x1b[J")
        room = max(1, height - 1)
        self._num_gone += max(0, len(lines) - room)
        self._lines = lines[-room:]

    def _render(self, block: str, width: int) -> list[Line]:
        """Its lines without empty ones at both ends."""
        try:
            printed = self._capture(_Answer(block), width)
        except Exception:  # a fault of the renderer is not to cost the answer
            printed = self._capture(Text(block), width)
        lines = [_measure(line.rstrip()) for line in printed.split("\n")]
        while lines and not lines[-1].num_columns:
            lines.pop()
        first = next((number for number, line in enumerate(lines) if line.num_columns), 0)
        return lines[first:]

    def _capture(self, shown: Markdown | Text, width: int) -> str:
        with self._console.capture() as captured:
            self._console.print(shown, width=width, end="")
        return captured.get()


def _measure(printed: str) -> Line:
    return Line(printed, cell_len(_STYLE.sub("", printed).rstrip()))


def _count_rows(line: Line, width: int) -> int:
    """Of the screen, where terminals wrap lines again that have become too long."""
    return max(1, -(-line.num_columns // max(1, width)))


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
