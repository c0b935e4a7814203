"""Reads messages at the prompt: with readline's editing, completion and history where Python has it.

Knows nothing of commands but what a completer offers.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import msgspec

from ....ipc.daemon.private_folder import find_state_folder

QUOTES = '"""'
_PROMPT, _MORE = ">>> ", "... "
_BOLD, _PLAIN = "\x01\x1b[1m\x02", "\x01\x1b[0m\x02"  # between signs that readline does not count as columns
MAX_ENTRIES = 1000
MAX_ENTRY_BYTES = 16 * 1024  # a longer one is not kept
_MAX_FILE_BYTES = 4 * 1024 * 1024


def find_history() -> Path:
    """Where the history of `quire chat` is."""
    return find_state_folder() / "chat_history.jsonl"


class LineHistory:
    """What was typed at the prompt, kept between runs in the file at `path`: this user's alone, a JSON text a
    line. What cannot be read or written is left: a chat does not end for its history.

    Programs that run at the same time add to one file. What is beyond its bounds goes when a run begins.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> list[str]:
        """The last entries, the oldest first."""
        try:
            with self._path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(0, size - _MAX_FILE_BYTES))
                lines = file.read(_MAX_FILE_BYTES).splitlines()
        except OSError:
            return []
        kept: list[str] = []
        for line in lines:
            with contextlib.suppress(msgspec.MsgspecError):  # cut by the bound, or by a full disk
                kept.append(msgspec.json.decode(line, type=str))
        shown = kept[-MAX_ENTRIES:]
        if len(lines) > 2 * MAX_ENTRIES or size > _MAX_FILE_BYTES:
            self._rewrite(shown)
        return shown

    def add(self, entry: str) -> None:
        """Append an entry at once: a terminal that is closed loses nothing."""
        line = _encode(entry)
        if len(line) > MAX_ENTRY_BYTES:
            return
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(self._path, flags, 0o600)
            try:
                os.fchmod(descriptor, 0o600)
                os.write(descriptor, line)
            finally:
                os.close(descriptor)

    def _rewrite(self, entries: list[str]) -> None:
        new = self._path.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):
            descriptor = os.open(new, os.O_CREAT | os.O_WRONLY | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(descriptor, "wb") as file:
                file.writelines(map(_encode, entries))
            os.replace(new, self._path)


def _encode(entry: str) -> bytes:
    return msgspec.json.encode(entry.encode(errors="replace").decode()) + b"\n"


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
