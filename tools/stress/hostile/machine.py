"""Attacks from the same machine and user: the core's socket, descriptors, the daemon's files, a full disk."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import time
from collections import Counter
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
from ....ipc.protocol.sockets import make_ipc_address
from ..noise import open_dealer, send_junk_to_core
from ..waiting import wait_until
from .attack import attack, sleep_until
from .plan import Target

_CONNECT_TIMEOUT_S = 2.0
_FOUND_TIMEOUT_S = 5.0  # for a daemon to see that its files are gone, and to be found again
_NUM_UNREAD_CALLS = 500
_PAUSE_S = 0.2
_CALLS = (UtilityMethod.CHECK_INTEGRITY, UtilityMethod.SNAPSHOT, UtilityMethod.METRICS)


@attack("junk", {"sent"})
def _send_junk(target: Target, rng: random.Random, until: float) -> Counter[str]:
    """Frames to the core that mean nothing."""
    num_sent = 0
    while time.monotonic() < until:
        num_sent += send_junk_to_core(target.daemon, rng)
    return Counter(sent=num_sent)


@attack("calls", {"answered", "refused", "unanswered"})
def _flood_with_calls(target: Target, _rng: random.Random, until: float) -> Counter[str]:
    """The dearest calls that a client may make, as fast as they go."""
    codec, answers = make_client_codec(), Counter[str]()
    num_sent, has_begun = 0, False
    with open_dealer(_find_socket(target)) as dealer:
        dealer.send_multipart(codec.encode(Hello(PROTOCOL_VERSION, "flood", os.getpid())))
        while time.monotonic() < until:
            if has_begun and num_sent - answers.total() < _NUM_UNREAD_CALLS:
                num_sent += 1
                call = UtilityCall(num_sent, _CALLS[num_sent % len(_CALLS)])
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


@attack("core-connections", {"connected", "refused"})
def _take_descriptors(target: Target, _rng: random.Random, until: float) -> Counter[str]:
    """Connections to the core's socket until it has no descriptor left for one more."""
    path = str(find_named(target.daemon) / CLIENT_SOCKET_NAME)
    answers: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        for _ in range(target.shrink(1500)):
            connection = stack.enter_context(socket.socket(socket.AF_UNIX))
            limit_s = min(_CONNECT_TIMEOUT_S, until - time.monotonic())
            if not wait_until(lambda: _is_connected(connection, path), limit_s):  # noqa: B023 - called here
                answers["refused"] += 1
                break
            answers["connected"] += 1
        sleep_until(until)
    return answers


@attack("deleted-files", {"found again"})
def _delete_files(target: Target, _rng: random.Random, until: float) -> Counter[str]:
    """The live daemon's files vanish: its lock, its state, its sockets, then its whole directory.

    'found again': it answers under its name, and nobody else can take that. Else 'lost', or 'name taken'.
    """
    directory = find_named(target.daemon)
    answers: Counter[str] = Counter()
    for pattern in ("lock", "daemon.json", "*.sock*", ""):
        if time.monotonic() >= until:
            break
        if pattern:
            for path in directory.glob(pattern):
                path.unlink(missing_ok=True)
        else:
            shutil.rmtree(directory, ignore_errors=True)
        answers[_find_end(target, directory)] += 1
    sleep_until(until)
    return answers


def _find_end(target: Target, directory: Path) -> str:
    if not wait_until(lambda: _is_whole(target), _FOUND_TIMEOUT_S):
        return "lost"
    try:
        RunDirectory.create_named(target.daemon).remove()
    except QuireError:
        return "found again" if directory.is_dir() else "lost"
    return "name taken"


def _is_whole(target: Target) -> bool:
    """Whether its owner is found, and its core's socket answers."""
    with contextlib.suppress(QuireError, OSError, zmq.ZMQError):
        if find_daemon(target.daemon) == target.supervisor_pid:
            with open_dealer(_find_socket(target)) as dealer:
                codec = make_client_codec()
                dealer.send_multipart(codec.encode(Hello(PROTOCOL_VERSION, "ps", os.getpid())))
                return bool(dealer.poll(1000))
    return False


@attack("full-disk", {"endured"})
def _fill_disk(target: Target, rng: random.Random, until: float) -> Counter[str]:
    """No process of the daemon and the server can write a byte to a file, while junk makes them log.

    Their limit on file sizes stands in for a disk without room: writes fail with EFBIG in place of ENOSPC.
    """
    parents = [psutil.Process(pid) for pid in (target.supervisor_pid, target.server_pid)]
    processes = parents + [child for parent in parents for child in parent.children(recursive=True)]
    for process in processes:
        _limit_files(process, 0)
    try:
        while time.monotonic() < until:
            send_junk_to_core(target.daemon, rng)
            time.sleep(_PAUSE_S)
    finally:
        for process in processes:
            _limit_files(process, None)
    return Counter(endured=1)


def _find_socket(target: Target) -> str:
    return make_ipc_address(str(find_named(target.daemon) / CLIENT_SOCKET_NAME))


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
