"""Keys of a terminal as they are pressed: bytes become characters and names such as 'up'."""

from __future__ import annotations

import os
import re
import sys
import termios
import tty
from collections.abc import Generator
from contextlib import contextmanager

from ....ipc.processes.process import wait_readable

_SEQUENCE = re.compile(rb"\x1b(?:\[|O)([0-9;]*)([A-Za-z~])|\x1b|[\x20-\x7e\t]|[^\x00]")
_NAMES = {b"A": "up", b"B": "down", b"H": "home", b"F": "end"}
_TILDES = {b"1": "home", b"4": "end", b"5": "pgup", b"6": "pgdn", b"7": "home", b"8": "end"}


@contextmanager
def unbuffered_keys() -> Generator[None]:
    """Keys arrive as they are pressed and are not shown. Ctrl-C ends the block."""
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def read_keys(timeout_s: float) -> list[str] | None:
    """What is pressed within `timeout_s`, [] if nothing; None when nothing more can be."""
    if not wait_readable(sys.stdin.fileno(), max(0.0, timeout_s)):
        return []
    data = os.read(sys.stdin.fileno(), 1024)
    return decode_keys(data) if data else None


def decode_keys(data: bytes) -> list[str]:
    """Sequences that have no name are left out."""
    keys: list[str] = []
    for found in _SEQUENCE.finditer(data):
        number, end = found.groups()
        if end == b"~":
            keys.append(_TILDES.get(number, ""))
        elif end is not None:
            keys.append(_NAMES.get(end, ""))
        elif found[0] == b"\x1b":
            keys.append("esc")
        else:
            keys.append(found[0].decode("latin-1"))
    return [key for key in keys if key]
