"""Copies to a device that is not there: they are done as late as a CUDA stream may do them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor


class LateCopies:
    """Asynchronous copies wait until an event behind them is waited for, or `finish`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_started = 0
        self.num_waits = 0
        self.num_bytes_pinned = 0
        self._pending: list[tuple[Tensor, Tensor]] = []
        self._copy, self._empty = torch.Tensor.copy_, torch.empty
        late = self

        class Event:
            """Recorded behind the copies that have been started."""

            def __init__(self) -> None:
                self._number = 0

            def record(self) -> None:
                self._number = late.num_started

            def synchronize(self) -> None:
                late.wait_until(self._number)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch, "empty", self._allocate)
        monkeypatch.setattr(torch.Tensor, "copy_", lambda *args, **options: late._start(*args, **options))

    def wait_until(self, number: int) -> None:
        """Do the first so many copies."""
        self.num_waits += 1
        while self._pending and self.num_started - len(self._pending) < number:
            self._copy(*self._pending.pop(0))

    def finish(self) -> None:
        """Do all that are left."""
        self.wait_until(self.num_started)

    def _start(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if not non_blocking:
            return self._copy(target, source)
        self.num_started += 1
        self._pending.append((target, source))
        return target

    def _allocate(self, *shape: Any, pin_memory: bool = False, device: Any = None, **options: Any) -> Tensor:
        del device
        tensor = self._empty(*shape, **options)
        self.num_bytes_pinned += tensor.nbytes if pin_memory else 0
        return tensor
