"""What was typed at the prompt, kept between runs: a file of this user's alone, a JSON text a line.

Programs that run at the same time add to one file. What it holds beyond its bounds goes when a run begins.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from ....ipc.daemon.private_folder import find_state_folder

MAX_ENTRIES = 1000
MAX_ENTRY_BYTES = 16 * 1024  # a longer one is not kept
_MAX_FILE_BYTES = 4 * 1024 * 1024


def find_history() -> Path:
    """Where the history of `quire chat` is."""
    return find_state_folder() / "chat_history.jsonl"


class LineHistory:
    """The file at `path`. What cannot be read or written is left: a chat does not end for its history."""

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
