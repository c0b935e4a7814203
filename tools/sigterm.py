"""What a tool has started must end with it, also when SIGTERM ends it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Generator
from types import FrameType
from typing import NoReturn


@contextlib.contextmanager
def unwinding_at_sigterm() -> Generator[None]:
    """Inside, the first SIGTERM raises SystemExit in the main thread, so that what was entered is left.

    A second one ends the process at once. Nothing happens when another thread enters.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def unwind(number: int, _frame: FrameType | None) -> NoReturn:
        signal.signal(number, signal.SIG_DFL)
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
