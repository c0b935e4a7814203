"""What goes on beside a run: again and again, in a thread of its own."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import ClassVar, Self


class Beside(ABC):
    """Acts every `period_s` from when its block is entered until it is left. Once."""

    period_s: ClassVar[float]

    def __init__(self) -> None:
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @abstractmethod
    def act(self) -> None:
        """Do it once more."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(self.period_s):
            self.act()
