"""Reads messages at the prompt: with readline's editing, completion and history where Python has it.

Knows nothing of commands but their words.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ....ipc.daemon.private_folder import find_state_folder

QUOTES = '"""'
_PROMPT, _MORE = ">>> ", "... "
_MAX_ENTRIES = 1000
_MAX_ENTRY_LENGTH = 16 * 1024  # characters; a longer line is not kept, nor is what was pasted as several


def find_history() -> Path:
    """Where the history of `quire chat` is."""
    return find_state_folder() / "chat_history"


class TypedLine(NamedTuple):
    """What the user typed: a command only if it was not quoted."""

    text: str
    is_quoted: bool


class LineEditor:
    """The prompt. `words` are those that the Tab key completes in a line that begins with a slash."""

    def __init__(self, words: Sequence[str] = (), history: Path | None = None) -> None:
        """history: a file, this user's alone, that keeps lines between runs; None: for this run only."""
        self._words = words
        self._history = history
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")  # typed bytes that are no UTF-8 do not end the chat
        self._readline = _load_readline() if sys.stdin.isatty() and sys.stdout.isatty() else None
        if self._readline is not None:
            self._set_up(self._readline)

    def read_message(self) -> TypedLine:
        """The next line, those joined by a backslash at the end of each, or those between triple quotes.

        Raises EOFError, KeyboardInterrupt.
        """
        line = self._read_line(_PROMPT)
        if line.lstrip().startswith(QUOTES):
            lines = [line.lstrip().removeprefix(QUOTES)]
            while not lines[-1].rstrip().endswith(QUOTES):
                lines.append(self._read_line(_MORE))
            lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
            return TypedLine("\n".join(lines).strip(), is_quoted=True)
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1].removesuffix("\\")
            lines.append(self._read_line(_MORE))
        return TypedLine("\n".join(lines).strip(), is_quoted=False)

    def _read_line(self, prompt: str) -> str:
        if not sys.stdout.isatty():  # what goes to a file is answers
            print(prompt, end="", file=sys.stderr, flush=True)
            prompt = ""
        line = input(prompt)
        if self._readline is not None and line.strip():
            self._remember(self._readline, line)
        return line

    def _remember(self, readline: Any, line: str) -> None:
        if "\n" in line or len(line) > _MAX_ENTRY_LENGTH:
            return
        readline.add_history(line)
        if self._history is not None:
            with contextlib.suppress(OSError):  # at once: a terminal that is closed loses nothing
                readline.append_history_file(1, self._history)

    def _set_up(self, readline: Any) -> None:
        is_libedit = "libedit" in (readline.__doc__ or "")
        readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")
        if not is_libedit:
            readline.parse_and_bind("set enable-bracketed-paste on")  # a pasted line break sends nothing
        readline.set_completer_delims(" ")
        readline.set_completer(self._find_completion)
        readline.set_auto_history(False)
        if self._history is not None:
            readline.set_history_length(_MAX_ENTRIES)
            with contextlib.suppress(OSError):  # a chat does not end for its history
                self._history.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._history.touch(0o600)
                readline.read_history_file(self._history)

    def _find_completion(self, word: str, number: int) -> str | None:
        assert self._readline is not None
        if not self._readline.get_line_buffer().startswith("/"):
            return f"{word}\t" if number == 0 else None  # the key itself
        words = [f"{known} " for known in self._words if known.startswith(word)]
        return words[number] if number < len(words) else None


def _load_readline() -> Any:
    """None where Python was built without it."""
    try:
        import readline
    except ImportError:
        return None
    return readline
