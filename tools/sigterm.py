"""What a tool has started must end with it, also when SIGTERM ends it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Generator
from types import FrameType

_SAME_WISH_S = 1.0


@contextlib.contextmanager
def unwinding_at_sigterm() -> Generator[None]:
    """Inside, the first SIGTERM raises SystemExit in the main thread, so that what was entered is left.

    A second one ends the process at once, unless it comes with the first: timeout(1) sends one to its child
    and one to the group of that. Nothing happens when another thread enters.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    first_at: list[float] = []

    def unwind(number: int, _frame: FrameType | None) -> None:
        if not first_at:
            first_at.append(time.monotonic())
            raise SystemExit(128 + number)
        if time.monotonic() > first_at[0] + _SAME_WISH_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    before = signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
