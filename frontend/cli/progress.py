"""A line on the terminal that says what is being waited for; nothing where nobody watches."""

from __future__ import annotations

import sys
from typing import Self


class PhaseLine:
    """`what: phase ...`, rewritten as phases begin."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._is_shown = sys.stderr.isatty()

    def __enter__(self) -> Self:
        self.show("starting")
        return self

    def __exit__(self, *_: object) -> None:
        self._write("")

    def show(self, phase: str) -> None:
        """Say that `phase` has begun."""
        self._write(f"{self._what}: {phase} ...")

    def _write(self, text: str) -> None:
        if self._is_shown:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
