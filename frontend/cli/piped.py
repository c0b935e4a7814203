"""What is piped into a command, up to a length that no model takes."""

from __future__ import annotations

import sys

from ...ipc.errors import PromptError

MAX_PIPED_LENGTH = 64 * 1024 * 1024  # characters


def read_lines(field: str, allowed: str) -> list[str]:
    """The lines piped in that are not blank. Raises PromptError naming `field` where there is none."""
    has_pipe = sys.stdin is not None and not sys.stdin.isatty()  # pyright: ignore[reportUnnecessaryComparison]
    try:
        text = read_piped(field) if has_pipe else ""
    except UnicodeDecodeError as error:
        raise PromptError(field, error.object[error.start :][:20], "texts in UTF-8") from None
    lines = split_lines(text)
    if not lines:
        raise PromptError(field, "", allowed)
    return lines


def split_lines(text: str) -> list[str]:
    """The lines that are not blank, where a line ends as it does in a terminal."""
    return [line.removesuffix("\r") for line in text.split("\n") if line.strip()]


def read_piped(field: str) -> str:
    """All of standard input, '' if it is closed. Raises PromptError naming `field` if it is too long."""
    if sys.stdin is None:  # pyright: ignore[reportUnnecessaryComparison]
        return ""
    text = sys.stdin.read(MAX_PIPED_LENGTH + 1)
    if len(text) > MAX_PIPED_LENGTH:
        raise PromptError(field, text[:20], f"at most {MAX_PIPED_LENGTH} characters piped in")
    return text
