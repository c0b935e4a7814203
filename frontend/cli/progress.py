"""A line on the terminal that says what is being waited for, and how far it is."""

from __future__ import annotations

import contextlib
import sys
from typing import Self

# Of an engine's start, in their order.
_PHASES = ("start worker", "import torch", "set up device", "load weights", "allocate KV cache", "warm up")
_WIDTH = 12  # of the bar


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

    def clear(self) -> None:
        """Take the line away."""
        if self._is_shown:
            self._write("")

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
