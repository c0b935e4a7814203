"""WorkerPlace: starts a worker's processes, here or on another machine, and exchanges messages with them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import zmq

from ...ipc.processes.process import ProcessHandle
from ...ipc.spec.config import EngineConfig


class WorkerPlace(ABC):
    """The place of one worker after the other, each of one process or one a rank.

    `open` comes before a worker's processes are started: messages from and to the worker before it are gone
    from then on.
    """

    is_elsewhere = False  # whether one process here stands for all ranks

    @abstractmethod
    def open(self) -> None:
        """Open an address for the next worker, in place of the last one's. Raises QuireError."""

    @abstractmethod
    def close(self) -> None:
        """Close the address. Idempotent."""

    @abstractmethod
    def start(self, rank: int, fd: int | None, config: EngineConfig) -> ProcessHandle:
        """Start a process; `fd` is the file that ranks on this machine share, None if there is none."""

    @property
    @abstractmethod
    def sockets(self) -> Sequence[zmq.Socket[bytes] | int]:
        """What becomes readable when `receive` or `has_lost_connection` has news; none while closed."""

    @abstractmethod
    def receive(self) -> tuple[bytes, list[bytes]] | None:
        """A message and its sender, None if there is none."""

    @abstractmethod
    def send(self, identity: bytes, frames: tuple[bytes]) -> None:
        """As `send_to` of ipc/protocol/sockets.py."""

    @abstractmethod
    def has_lost_connection(self) -> bool:
        """Whether a connection has ended since the last call."""

    @abstractmethod
    def note_ready(self) -> None:
        """The worker that was started last is ready."""

    @abstractmethod
    def stop(self) -> None:
        """There will be no other worker: end a spare. Idempotent."""
