"""A terminal for tests: what stands on its screen after the bytes that a program has written to it.

It knows what Quire's programs and rich write, and raises for anything else.
"""

from __future__ import annotations

import re

from rich.cells import cell_len

_SEQUENCE = re.compile(r"\x1b\[(\??)([0-9;]*)([A-Za-z])|\x1b([=>78])|\x1b\][^\x07]*\x07")


class TerminalScreen:
    """`feed` it, then look at `lines`; `scrolled` are those that have left at the top."""

    def __init__(self, width: int = 80, height: int = 24) -> None:
        self.width, self.height = width, height
        self.scrolled: list[str] = []
        self._rows: list[list[str]] = [[]]
        self._row = self._column = 0
        self._rest = ""

    @property
    def lines(self) -> list[str]:
        """From the top, without blanks at their ends."""
        return ["".join(row).rstrip() for row in self._rows]

    @property
    def text(self) -> str:
        """All that can be read, also by scrolling back."""
        return "\n".join([*self.scrolled, *self.lines])

    def feed(self, text: str) -> None:
        """Take what was written; a sequence may be cut."""
        text, self._rest = self._rest + text, ""
        place = 0
        while place < len(text):
            if text[place] != "\x1b":
                self._put(text[place])
                place += 1
            elif found := _SEQUENCE.match(text, place):
                self._obey(found)
                place = found.end()
            elif len(text) - place < 12:
                self._rest = text[place:]
                return
            else:
                raise AssertionError(f"a sequence that is not known: {text[place : place + 12]!r}")

    def _put(self, sign: str) -> None:
        if sign == "\n":
            self._column = 0  # as the terminal's driver makes it
            self._go_down()
        elif sign == "\r":
            self._column = 0
        elif sign == "\b":
            self._column = max(0, self._column - 1)
        elif sign == "\a":
            pass
        else:
            assert sign.isprintable(), f"{sign!r} is printed"
            self._write(sign, cell_len(sign))

    def _write(self, sign: str, width: int) -> None:
        if self._column + width > self.width:
            self._column = 0
            self._go_down()
        row = self._rows[self._row]
        row += [" "] * (self._column + width - len(row))
        row[self._column : self._column + width] = [sign] + [""] * (width - 1)
        self._column += width

    def _go_down(self) -> None:
        self._row += 1
        if self._row == len(self._rows):
            self._rows.append([])
        if self._row == self.height:
            self.scrolled.append("".join(self._rows.pop(0)).rstrip())
            self._row -= 1

    def _obey(self, found: re.Match[str]) -> None:
        private, given, command, _ = found.groups()
        if command is None or private or command in "ml":  # modes, titles and colours
            return
        numbers = [int(one or 0) for one in given.split(";")]
        match command:
            case "A":
                self._row = max(0, self._row - max(1, numbers[0]))
            case "C":
                self._column = min(self.width - 1, self._column + max(1, numbers[0]))
            case "H":
                self._row = max(1, numbers[0]) - 1
                self._column = max(1, numbers[1] if len(numbers) > 1 else 1) - 1
                self._rows += [[] for _ in range(self._row + 1 - len(self._rows))]
            case "K":
                del self._rows[self._row][0 if numbers[0] else self._column :]
            case "J":
                if numbers[0] == 2:
                    self._rows, self._row = [[] for _ in range(self._row + 1)], self._row
                else:
                    del self._rows[self._row + 1 :]
                    del self._rows[self._row][self._column :]
            case _:
                raise AssertionError(f"a sequence that is not known: {found[0]!r}")
