"""What a running daemon can be told: commands over a datagram socket in its run directory, and their answers.

The directory's mode is 0700, so who reaches the socket is this user. A command is one datagram, its answer
another, which comes when it is done: that may take as long as the requests that have to end first. Who waits
for it looks whether the supervisor lives. A start, a stop and the restart of a single engine are no commands.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from ..decoding import decode_json
from ..errors import DaemonError, raise_remote

CONTROL_SOCKET_NAME = "control.sock"
_MAX_DATAGRAM_BYTES = 65536
_MAX_COMMANDS = 16  # taken in one turn of the supervisor
_RETRY_S = 0.05
_CHECK_INTERVAL_S = 0.5
_SEND_TIMEOUT_S = 3.0  # a cleaner may have removed the socket, which the supervisor makes again


class DrainEngine(msgspec.Struct, frozen=True, tag="drain"):
    """Give an engine nothing new, and have its requests moved. Done when it has nothing to do."""

    index: int


class ResumeEngine(msgspec.Struct, frozen=True, tag="resume"):
    """Give a drained engine requests again."""

    index: int


class RestartEngines(msgspec.Struct, frozen=True, tag="restart"):
    """Restart one engine, or all one after the other, each drained before. Done when they are ready."""

    index: int | None = None


class AddEngine(msgspec.Struct, frozen=True, tag="add"):
    """Start one more engine. Done when it is ready; the answer has its number."""


class RemoveEngine(msgspec.Struct, frozen=True, tag="remove"):
    """Drain an engine, then end it."""

    index: int


class CommandDone(msgspec.Struct, frozen=True, tag="done"):
    """A command is done. `index` is of the engine that was added."""

    index: int | None = None


class CommandRefused(msgspec.Struct, frozen=True, tag="refused"):
    """A command was not done, or not to its end. `kind`: the error's class, as of raise_remote."""

    reason: str
    kind: str = "DaemonError"


Command = DrainEngine | ResumeEngine | RestartEngines | AddEngine | RemoveEngine
Answer = CommandDone | CommandRefused


class ControlSocket:
    """The supervisor's end. `fileno` is readable when there are commands; nothing here waits."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / CONTROL_SOCKET_NAME
        self._socket = _make_socket()

    def fileno(self) -> int:
        """The socket's descriptor, which changes when `maintain` returns True."""
        return self._socket.fileno()

    def maintain(self) -> bool:
        """Bind the socket, if its file is missing. True if the descriptor has changed. Raises OSError."""
        if os.path.lexists(self._path):
            return False
        self._socket.close()
        self._socket = _make_socket()
        self._socket.bind(str(self._path))
        return True

    def receive(self) -> Iterator[tuple[str, Command]]:
        """(sender, command) of each command that has come. A bad one is refused here."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(_MAX_COMMANDS):
                data, sender = self._socket.recvfrom(_MAX_DATAGRAM_BYTES)
                try:
                    yield sender, decode_json(data, Command)
                except msgspec.MsgspecError as error:
                    self.answer(sender, CommandRefused(f"the daemon does not know this command: {error}"))

    def answer(self, sender: str, answer: Answer) -> None:
        """Send an answer, if the sender is still there."""
        with contextlib.suppress(OSError, ValueError):
            self._socket.sendto(msgspec.json.encode(answer), sender)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def send_command(
    directory: Path, command: Command, timeout_s: float, check_daemon: Callable[[], None]
) -> CommandDone:
    """Have a daemon do it, and wait until it has. `check_daemon` raises if it has ended meanwhile.

    Raises what it was refused with, and DaemonError if it takes longer; it then goes on all the same.
    """
    path = directory / f"a{secrets.token_hex(3)}"
    deadline = time.monotonic() + timeout_s
    with _make_socket() as asking:
        try:
            asking.bind(str(path))
        except OSError as error:
            raise DaemonError(f"the run directory {directory} cannot be written: {error.strerror}") from error
        try:
            _send(asking, directory, msgspec.json.encode(command), check_daemon)
            answer = _wait_for_answer(asking, deadline, timeout_s, check_daemon)
        finally:
            path.unlink(missing_ok=True)
    if isinstance(answer, CommandRefused):
        raise_remote(answer.kind, answer.reason)
    return answer


def _send(asking: socket.socket, directory: Path, data: bytes, check_daemon: Callable[[], None]) -> None:
    deadline = time.monotonic() + _SEND_TIMEOUT_S
    while True:
        try:
            asking.sendto(data, str(directory / CONTROL_SOCKET_NAME))
            return
        except OSError as error:
            check_daemon()
            if time.monotonic() > deadline:
                raise DaemonError(f"the daemon takes no commands: {error.strerror}") from error
        time.sleep(_RETRY_S)


def _wait_for_answer(
    asking: socket.socket, deadline: float, timeout_s: float, check_daemon: Callable[[], None]
) -> Answer:
    poller = select.poll()
    poller.register(asking, select.POLLIN)
    while (left_s := deadline - time.monotonic()) > 0:
        if poller.poll(1000 * min(left_s, _CHECK_INTERVAL_S)):
            return decode_json(asking.recv(_MAX_DATAGRAM_BYTES), Answer)
        check_daemon()
    raise DaemonError(f"the daemon was not done within {timeout_s:g} s; it goes on")


def _make_socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    made.setblocking(False)
    return made
