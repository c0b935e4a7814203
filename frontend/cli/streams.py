"""The standard streams of a command: what is piped in, a line that says what is being waited for, and a
model's text on a terminal, which shows control characters rather than obey them.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Self, TextIO

from ...ipc.errors import PromptError

MAX_PIPED_LENGTH = 64 * 1024 * 1024  # characters
# Of an engine's start, in their order.
_PHASES = ("start worker", "import torch", "set up device", "load weights", "allocate KV cache", "warm up")
_WIDTH = 12  # of the bar
# A model may have been told to write them: they move the cursor, set the title, fill the clipboard.
_CONTROLS: dict[int, int | None] = {
    **{code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"},
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
    0x7F: 0x2421,
    ord("\r"): None,
}


def read_lines(field: str, allowed: str) -> list[str]:
    """The lines piped in that are not blank. Raises PromptError naming `field` where there is none."""
    has_pipe = sys.stdin is not None and not sys.stdin.isatty()  # pyright: ignore[reportUnnecessaryComparison]
    try:
        text = read_piped(field) if has_pipe else ""
    except UnicodeDecodeError as error:
        raise PromptError(field, error.object[error.start :][:20], "texts in UTF-8") from None
    lines = split_lines(text)
    if not lines:
        raise PromptError(field, "", allowed)
    return lines


def split_lines(text: str) -> list[str]:
    """The lines that are not blank, where a line ends as it does in a terminal."""
    return [line.removesuffix("\r") for line in text.split("\n") if line.strip()]


def read_piped(field: str) -> str:
    """All of standard input, '' if it is closed. Raises PromptError naming `field` if it is too long."""
    if sys.stdin is None:  # pyright: ignore[reportUnnecessaryComparison]
        return ""
    text = sys.stdin.read(MAX_PIPED_LENGTH + 1)
    if len(text) > MAX_PIPED_LENGTH:
        raise PromptError(field, text[:20], f"at most {MAX_PIPED_LENGTH} characters piped in")
    return text


class PhaseLine:
    """`[##--] what: phase ...`, rewritten as phases begin; nothing where nobody watches.

    `prints_lines`: who does not watch a terminal gets a line a phase.
    """

    def __init__(self, what: str, prints_lines: bool = False) -> None:
        self._what = what
        self._is_shown = sys.stderr.isatty()
        self._prints_lines = prints_lines
        self._num_done = 0

    def __enter__(self) -> Self:
        self.show("starting")
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def show(self, phase: str) -> None:
        """Say that `phase` has begun."""
        if not self._is_shown:
            if self._prints_lines:
                with contextlib.suppress(OSError):  # a server does not end because nobody reads
                    print(f"quire: {phase} ...", file=sys.stderr, flush=True)
            return
        name = phase.rpartition(": ")[2]  # behind 'engine 1: '
        self._num_done = _PHASES.index(name) if name in _PHASES else self._num_done
        num_filled = _WIDTH * self._num_done // len(_PHASES)
        bar = "#" * num_filled + "-" * (_WIDTH - num_filled)
        self._write(f"[{bar}] {self._what}: {phase} ...\r")  # other processes' lines begin at the left too

    def end(self) -> None:
        """Say that it has ended, to whoever saw its phases."""
        if self._is_shown or self._prints_lines:
            with contextlib.suppress(OSError):
                print(f"quire: {self._what} has ended", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Take the line away."""
        if self._is_shown:
            self._write("")

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def show_controls(text: str, stream: TextIO) -> str:
    """A file gets what the model wrote, a terminal no control characters."""
    return text.translate(_CONTROLS) if stream.isatty() else text
