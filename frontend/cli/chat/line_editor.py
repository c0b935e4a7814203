"""Reads messages at the prompt: with readline's editing, completion and history where Python has it.

Knows nothing of commands but what a completer offers.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NamedTuple

from .line_history import LineHistory

QUOTES = '"""'
_PROMPT, _MORE = ">>> ", "... "
_BOLD, _PLAIN = "\x01\x1b[1m\x02", "\x01\x1b[0m\x02"  # between signs that readline does not count as columns


class Typed(NamedTuple):
    """What the user typed: a command only if it was not quoted."""

    text: str
    is_quoted: bool


class LineEditor:
    """The prompt. `complete` has the words that may follow a line's beginning."""

    def __init__(
        self,
        complete: Callable[[str], Sequence[str]] = lambda _line: (),
        history: LineHistory | None = None,
        has_color: bool = False,
    ) -> None:
        """history: None keeps what is typed for this run only."""
        self._complete = complete
        self._history = history
        _accept_any_bytes()
        self._readline = _load_readline() if sys.stdin.isatty() and sys.stdout.isatty() else None
        is_bold = has_color and self._readline is not None
        self._prompt = f"{_BOLD}{_PROMPT}{_PLAIN}" if is_bold else _PROMPT
        if self._readline is not None:
            self._set_up(self._readline)

    def read_message(self) -> Typed:
        """The next line, those joined by a backslash at the end of each, or those between triple quotes.

        Raises EOFError, KeyboardInterrupt.
        """
        line = self._read_line(self._prompt)
        if line.lstrip().startswith(QUOTES):
            return self._read_quoted(line)
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1].removesuffix("\\")
            lines.append(self._read_line(_MORE))
        text = "\n".join(lines).strip()
        self._remember(text)
        return Typed(text, is_quoted=False)

    def _read_quoted(self, line: str) -> Typed:
        lines = [line.lstrip().removeprefix(QUOTES)]
        while not lines[-1].rstrip().endswith(QUOTES):
            lines.append(self._read_line(_MORE))
        lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
        text = "\n".join(lines).strip()
        self._remember(f"{QUOTES}{text}{QUOTES}" if text else "")
        return Typed(text, is_quoted=True)

    def _read_line(self, prompt: str) -> str:
        if not sys.stdout.isatty():  # what goes to a file is answers
            print(prompt, end="", file=sys.stderr, flush=True)
            prompt = ""
        return input(prompt)

    def _remember(self, text: str) -> None:
        if not text or self._readline is None:
            return
        length = self._readline.get_current_history_length()
        if length and self._readline.get_history_item(length) == text:
            return
        self._readline.add_history(text)
        if self._history is not None:
            self._history.add(text)

    def _set_up(self, readline: ModuleType) -> None:
        is_libedit = "libedit" in (readline.__doc__ or "")
        readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")
        if not is_libedit:
            readline.parse_and_bind("set enable-bracketed-paste on")  # a pasted line break sends nothing
        readline.set_completer_delims(" ")
        readline.set_completer(self._find_completion)
        readline.set_auto_history(False)  # a message of several lines is one entry
        for entry in self._history.load() if self._history is not None else ():
            readline.add_history(entry)

    def _find_completion(self, word: str, number: int) -> str | None:
        assert self._readline is not None
        line = self._readline.get_line_buffer()[: self._readline.get_endidx()]
        if not line.startswith("/"):
            return f"{word}\t" if number == 0 else None  # the key itself
        words = [one for one in self._complete(line) if one.startswith(word)]
        if number >= len(words):
            return None
        return words[number] if words[number].endswith("/") else f"{words[number]} "


def _load_readline() -> ModuleType | None:
    """None where Python was built without it."""
    try:
        import readline
    except ImportError:
        return None
    return readline


def _accept_any_bytes() -> None:
    """Typed bytes that are no UTF-8 become replacement characters instead of an error that ends the chat."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
