"""The `quire` command, one file a subcommand; a subcommand's file is loaded when it is called."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run `quire` with `argv` (None: the process's own) and return its exit code."""
    from .entry import run_command

    return run_command(argv)
