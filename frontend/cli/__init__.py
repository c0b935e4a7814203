"""The `quire` command, one file a subcommand; a subcommand's file is loaded when it is called."""

from __future__ import annotations

import signal
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run `quire` with `argv` (None: the process's own) and return its exit code."""
    try:
        from .entry import run_command

        code = run_command(argv)
    except KeyboardInterrupt:  # while it is loaded, or a second one while the first is answered
        code = 130
    if argv is None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # this process ends now, and says no more
    return code
