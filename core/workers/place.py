"""WorkerPlace: where the processes of a worker run, and how they are spoken to there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import zmq

from ...ipc.processes.process import ProcessHandle
from ...ipc.spec.config import EngineConfig


class WorkerPlace(ABC):
    """Has one worker after the other, of one process or one a rank, which may be on another machine.

    `open` comes before the processes of each are started: what those before it have sent, or are sent, is
    gone from then on.
    """

    is_elsewhere = False  # one process stands here for all ranks

    @abstractmethod
    def open(self) -> None:
        """Have an address for the next worker, in place of the one before. Raises QuireError."""

    @abstractmethod
    def close(self) -> None:
        """Nobody is spoken to any more. Idempotent."""

    @abstractmethod
    def start(self, rank: int, fd: int | None, config: EngineConfig) -> ProcessHandle:
        """Start a process; `fd` is of the file that ranks on this machine share, None if there is none."""

    @property
    @abstractmethod
    def sockets(self) -> Sequence[zmq.Socket[bytes] | int]:
        """What becomes readable when `receive` or `has_lost_connection` has something; none while closed."""

    @abstractmethod
    def receive(self) -> tuple[bytes, list[bytes]] | None:
        """Who has said something, and that; None if nobody has."""

    @abstractmethod
    def send(self, identity: bytes, frames: tuple[bytes]) -> None:
        """As `send_to` of ipc/protocol/sockets.py."""

    @abstractmethod
    def has_lost_connection(self) -> bool:
        """Whether a connection has ended since the last call."""

    @abstractmethod
    def note_ready(self) -> None:
        """The worker that was started last computes."""

    @abstractmethod
    def stop(self) -> None:
        """There will be no other worker; what was kept for it ends. Idempotent."""
