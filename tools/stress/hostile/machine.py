"""Attacks from the same machine and user: the core's socket, descriptors, the daemon's files, a full disk."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import psutil
import zmq

from ....ipc.daemon.daemon_state import CLIENT_SOCKET_NAME
from ....ipc.daemon.run_dir import RunDirectory, find_daemon, find_named
from ....ipc.errors import ProtocolError, QuireError
from ....ipc.protocol.codec import make_client_codec
from ....ipc.protocol.messages import (
    PROTOCOL_VERSION,
    Hello,
    UtilityCall,
    UtilityMethod,
    UtilityResult,
    Welcome,
)
from ....ipc.protocol.sockets import connect_dealer, make_ipc_address
from ..noise import send_junk_to_core
from ..waiting import wait_until
from .attack import Attack

_CONNECT_TIMEOUT_S = 2.0
_FOUND_TIMEOUT_S = 5.0  # for a daemon to see that its files are gone, and to be found again
_NUM_UNREAD_CALLS = 500
_PAUSE_S = 0.2


class Junk(Attack):
    """Frames to the core that mean nothing."""

    allowed = frozenset({"sent"})

    def play(self, until: float) -> Counter[str]:
        num_sent = 0
        while time.monotonic() < until:
            num_sent += send_junk_to_core(self.target.daemon, self.rng)
        return Counter(sent=num_sent)


class Calls(Attack):
    """The dearest calls that a client may make, as fast as they go."""

    allowed = frozenset({"answered", "refused", "unanswered"})
    methods = (UtilityMethod.CHECK_INTEGRITY, UtilityMethod.SNAPSHOT, UtilityMethod.METRICS)

    def play(self, until: float) -> Counter[str]:
        with _open_dealer(self.target.daemon) as dealer:
            return self._flood(dealer, until)

    def _flood(self, dealer: zmq.Socket[bytes], until: float) -> Counter[str]:
        codec = make_client_codec()
        dealer.send_multipart(codec.encode(Hello(PROTOCOL_VERSION, "flood", os.getpid())))
        answers: Counter[str] = Counter()
        num_sent, has_begun = 0, False
        while time.monotonic() < until:
            if has_begun and num_sent - answers.total() < _NUM_UNREAD_CALLS:
                num_sent += 1
                call = UtilityCall(num_sent, self.methods[num_sent % len(self.methods)])
                with contextlib.suppress(zmq.Again):
                    dealer.send_multipart(codec.encode(call), zmq.NOBLOCK)
                if not dealer.poll(0):
                    continue
            elif not dealer.poll(100):
                continue
            with contextlib.suppress(ProtocolError):
                message = codec.decode(dealer.recv_multipart())
                has_begun = has_begun or isinstance(message, Welcome)
                if isinstance(message, UtilityResult):
                    answers["answered" if message.error is None else "refused"] += 1
        answers["unanswered"] = num_sent - answers.total()
        return answers


class CoreConnections(Attack):
    """Connections to the core's socket until it has no descriptor left for one more."""

    allowed = frozenset({"connected", "refused"})

    def play(self, until: float) -> Counter[str]:
        path = str(find_named(self.target.daemon) / CLIENT_SOCKET_NAME)
        answers: Counter[str] = Counter()
        with contextlib.ExitStack() as stack:
            for _ in range(self.target.shrink(1500)):
                connection = stack.enter_context(socket.socket(socket.AF_UNIX))
                limit_s = min(_CONNECT_TIMEOUT_S, until - time.monotonic())
                if not wait_until(lambda: _is_connected(connection, path), limit_s):  # noqa: B023 - called here
                    answers["refused"] += 1
                    break
                answers["connected"] += 1
            _wait_until(until)
        return answers


class DeletedFiles(Attack):
    """The live daemon's files vanish: its lock, its state, its sockets, then its whole directory.

    'found again': it answers under its name, and nobody else can take that. Else 'lost', or 'name taken'.
    """

    allowed = frozenset({"found again"})

    def play(self, until: float) -> Counter[str]:
        directory = find_named(self.target.daemon)
        answers: Counter[str] = Counter()
        for pattern in ("lock", "daemon.json", "*.sock*", ""):
            if time.monotonic() >= until:
                break
            if pattern:
                for path in directory.glob(pattern):
                    path.unlink(missing_ok=True)
            else:
                shutil.rmtree(directory, ignore_errors=True)
            answers[self._find_end(directory)] += 1
        _wait_until(until)
        return answers

    def _find_end(self, directory: Path) -> str:
        if not wait_until(self._is_whole, _FOUND_TIMEOUT_S):
            return "lost"
        try:
            RunDirectory.create_named(self.target.daemon).remove()
        except QuireError:
            return "found again" if directory.is_dir() else "lost"
        return "name taken"

    def _is_whole(self) -> bool:
        """Its owner is found, and its core's socket answers."""
        with contextlib.suppress(QuireError, OSError, zmq.ZMQError):
            if find_daemon(self.target.daemon) == self.target.supervisor_pid:
                with _open_dealer(self.target.daemon) as dealer:
                    codec = make_client_codec()
                    dealer.send_multipart(codec.encode(Hello(PROTOCOL_VERSION, "ps", os.getpid())))
                    return bool(dealer.poll(1000))
        return False


class FullDisk(Attack):
    """No process of the daemon and the server can write a byte to a file, while junk makes them log.

    Their limit on file sizes stands in for a disk without room: writes fail with EFBIG in place of ENOSPC.
    """

    allowed = frozenset({"endured"})

    def play(self, until: float) -> Counter[str]:
        processes = self._find_processes()
        for process in processes:
            _limit_files(process, 0)
        try:
            while time.monotonic() < until:
                send_junk_to_core(self.target.daemon, self.rng)
                time.sleep(_PAUSE_S)
        finally:
            for process in processes:
                _limit_files(process, None)
        return Counter(endured=1)

    def _find_processes(self) -> list[psutil.Process]:
        parents = [psutil.Process(pid) for pid in (self.target.supervisor_pid, self.target.server_pid)]
        return parents + [child for parent in parents for child in parent.children(recursive=True)]


def _is_connected(connection: socket.socket, path: str) -> bool:
    """Try to; a socket whose queue of new ones is full says so at once."""
    try:
        connection.connect(path)
    except OSError:
        return False
    return True


def _limit_files(process: psutil.Process, size: int | None) -> None:
    """The largest file that it may write; None: as large as it might ever have."""
    with contextlib.suppress(psutil.Error):
        _, hard = process.rlimit(psutil.RLIMIT_FSIZE)
        process.rlimit(psutil.RLIMIT_FSIZE, (hard if size is None else size, hard))


@contextlib.contextmanager
def _open_dealer(daemon: str) -> Generator[zmq.Socket[bytes]]:
    address = make_ipc_address(str(find_named(daemon) / CLIENT_SOCKET_NAME))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.sndtimeo = int(1000 * _CONNECT_TIMEOUT_S)
    try:
        yield connect_dealer(dealer, address)
    finally:
        dealer.close(linger=0)
        context.term()


def _wait_until(until: float) -> None:
    time.sleep(max(0.0, until - time.monotonic()))
