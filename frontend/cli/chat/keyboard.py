"""The keyboard while an answer comes: Ctrl-C ends the answer, and what is typed shows at the next prompt."""

from __future__ import annotations

import contextlib
import signal
import sys
import termios
from collections.abc import Generator


class Interrupt:
    """Whether Ctrl-C was pressed."""

    is_set = False


@contextlib.contextmanager
def interrupts_noted() -> Generator[Interrupt]:
    """Inside, a first Ctrl-C is only noted; a second one raises KeyboardInterrupt, in case nothing moves."""
    interrupt = Interrupt()

    def note(_number: int, _frame: object) -> None:
        if interrupt.is_set:
            raise KeyboardInterrupt
        interrupt.is_set = True

    if not sys.stdin.isatty():  # a pipe has no second message to go on with: Ctrl-C ends the program
        yield interrupt
        return
    with _silent_keys():
        previous = signal.signal(signal.SIGINT, note)
        try:
            yield interrupt
        finally:
            signal.signal(signal.SIGINT, previous)


@contextlib.contextmanager
def _silent_keys() -> Generator[None]:
    """Keys that are pressed meanwhile are kept for the prompt, and do not stand in the answer."""
    try:
        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
    except (OSError, termios.error):  # no terminal that can do that
        yield
        return
    silent = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(descriptor, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        with contextlib.suppress(termios.error):  # the terminal was closed
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
