"""What the `quire` command's exit code means."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Every exit code of the `quire` command."""

    OK = 0
    FAILED = 1  # it started and could not finish; the last line on stderr is the root cause
    USAGE = 2  # a value that the user gave cannot be used; nothing was started
    INTERRUPTED = 130  # Ctrl-C, as shells report SIGINT
    OUTPUT_CLOSED = 141  # the reader of stdout left, as shells report SIGPIPE
