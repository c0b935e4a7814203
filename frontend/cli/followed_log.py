"""A log file as it is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TextIO

_CHUNK = 65_536  # characters


def follow_log(log: TextIO, is_running: Callable[[], bool], wait: Callable[[], None]) -> Iterator[str]:
    """What comes after where `log` stands, until its writer has ended and all of it has been read.

    wait: called whenever there is no more for the moment.
    """
    while True:
        runs = is_running()  # asked first: what is written before the end is read after it
        while text := log.read(_CHUNK):
            yield text
        if not runs:
            return
        wait()
