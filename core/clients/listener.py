"""Listener: keeps the core's client socket where clients look for it, and the core within its descriptors.

If somebody removes the socket's file it is bound again, beside the listener that nobody finds any more. And
libzmq ends its process when it is given no descriptor for a new connection (ipc_listener.cpp, accept: EMFILE
is not among the errors that it bears): while few are left the file has another name. Connections that stand
notice neither; to unbind would end them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
from pathlib import Path

import zmq
from zmq.utils.monitor import parse_monitor_message

from ...ipc.daemon.private_folder import make_socket_folder
from ...ipc.errors import QuireError

_log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 0.5  # at most so often; an idle core of a daemon has a turn every 0.7 s
# Of all descriptors, those kept for what is not a client's connection, and for what is accepted before the
# core has seen that there are many: on a busy machine some hundreds came in one turn.
_RESERVED_FRACTION = 0.7
_REOPEN_FRACTION = 0.75
_MAX_EVENTS = 64  # taken in a turn: who connects without end must not keep the core from looking


class Listener:
    """A bound ROUTER's address and `monitor`. `check` belongs into every turn, and mostly costs nothing."""

    def __init__(self, router: zmq.Socket[bytes], address: str) -> None:
        self._router = router
        self._address = address
        self._path = Path(address.removeprefix("ipc://"))
        self._hidden_path = self._path.with_name(f".{self._path.name}")
        self.monitor = router.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_ACCEPTED)
        self._check_at = 0.0
        self._is_closed = False  # for lack of descriptors

    def read_events(self) -> bool:
        """Take what the monitor says; True if a connection has ended."""
        events: set[int] = set()
        with contextlib.suppress(zmq.Again):
            for _ in range(_MAX_EVENTS):
                events.add(parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))["event"])
        if zmq.EVENT_ACCEPTED in events:
            self._check_at = 0.0
        return zmq.EVENT_DISCONNECTED in events

    def check(self, now: float) -> None:
        """Close, open or restore the address if that is due. Monotonic time."""
        if now < self._check_at:
            return
        self._check_at = now + CHECK_INTERVAL_S
        fraction = _fraction_left()
        if not self._is_closed and fraction < _RESERVED_FRACTION:
            _log.error("file descriptors run out: no new client is let in for a while (ulimit -n)")
            self._is_closed = True
            self._rename(self._path, self._hidden_path)
        elif self._is_closed and fraction > _REOPEN_FRACTION:
            _log.warning("there are file descriptors for new clients again")
            self._is_closed = False
            self._rename(self._hidden_path, self._path)
        if not self._is_closed and not os.path.lexists(self._path):
            self._bind()

    def _rename(self, old: Path, new: Path) -> None:
        with contextlib.suppress(FileNotFoundError):  # somebody has removed it
            os.rename(old, new)

    def _bind(self) -> None:
        """Once more: libzmq keeps the listener that there was, with its connections."""
        try:
            make_socket_folder(self._path)
            self._router.bind(self._address)
        except (QuireError, OSError, zmq.ZMQError) as error:
            _log.error("clients cannot come: %s", error)
        else:
            _log.warning("%s was removed; it is made again", self._path)


def _fraction_left() -> float:
    """The part of this process's file descriptors that is free."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1.0 if limit == resource.RLIM_INFINITY else 1.0 - len(os.listdir("/proc/self/fd")) / limit
