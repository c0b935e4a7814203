"""What is piped into a command, up to a length that no model takes."""

from __future__ import annotations

import sys

from ...ipc.errors import PromptError

MAX_PIPED_LENGTH = 64 * 1024 * 1024  # characters


def read_piped(field: str) -> str:
    """All of standard input, '' if it is closed. Raises PromptError naming `field` if it is too long."""
    if sys.stdin is None:  # pyright: ignore[reportUnnecessaryComparison]
        return ""
    text = sys.stdin.read(MAX_PIPED_LENGTH + 1)
    if len(text) > MAX_PIPED_LENGTH:
        raise PromptError(field, text[:20], f"at most {MAX_PIPED_LENGTH} characters piped in")
    return text
