"""A model's text on a terminal, which shows control characters rather than obey them."""

from __future__ import annotations

from typing import TextIO

# A model may have been told to write them: they move the cursor, set the title, fill the clipboard.
_CONTROLS: dict[int, int | None] = {
    **{code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"},
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
    0x7F: 0x2421,
    ord("\r"): None,
}


def show_controls(text: str, stream: TextIO) -> str:
    """A file gets what the model wrote, a terminal no control characters."""
    return text.translate(_CONTROLS) if stream.isatty() else text
