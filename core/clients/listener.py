"""ClientListener: a socket for clients, whose connections a thread watches; Listener: that of this machine's.

A Listener keeps the socket reachable, and the core from running out of file descriptors.

If the socket's file is removed, the address is bound again; libzmq keeps the old listener's connections.
libzmq ends its process when it gets no descriptor for a new connection (ipc_listener.cpp, accept: it does not
bear EMFILE). So while few descriptors are left the file has another name, under which no client looks.
Neither disturbs the connections that there are; to unbind would end them.

A thread reads the socket's monitor: libzmq accepts some ten connections a millisecond, and a turn of the core
may take longer than its descriptors last. When a thousand events are unread, libzmq's thread waits for their
reader: with 2,048 descriptors or more the reserve therefore suffices. While it waits it holds a lock that
binding, or ending the monitor, needs too. So both are called without the interpreter's lock, which the reader
needs (pyzmq would keep it).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import logging
import os
import resource
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import zmq

from ...ipc.daemon.private_folder import make_socket_folder
from ...ipc.errors import QuireError
from ...ipc.protocol.sockets import NOBLOCK, receive_event, send_to
from .origin import is_remote

_log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 0.5  # between looks at the file; an idle core of a daemon has a turn every 0.7 s
_RECHECK_MS = 100  # between looks whether there are descriptors again
# The part of all descriptors that is not for clients' connections, or for those accepted before the name is
# hidden.
_RESERVED_FRACTION = 0.7
_REOPEN_FRACTION = 0.75
_MAX_EVENTS = 64  # taken before the next look at descriptors or keys
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
_MONITOR_ADDRESS = "inproc://clients"
_STOP_TIMEOUT_S = 1.0


class ClientListener(ABC):
    """A bound ROUTER for clients, watched by a thread until `stop`.

    `lost_fd` is readable when a client's connection has ended.
    """

    def __init__(self, router: zmq.Socket[bytes]) -> None:
        """Begin to watch. The queue of events is as short as libzmq allows."""
        self.router = router
        self.lost_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        router.monitor(_MONITOR_ADDRESS, _EVENTS)
        monitor = router.context.socket(zmq.PAIR)
        monitor.setsockopt(zmq.RCVHWM, 1)
        monitor.connect(_MONITOR_ADDRESS)
        self._thread = threading.Thread(target=self._watch, args=(monitor,), name="listener", daemon=True)
        self._thread.start()

    @abstractmethod
    def receive(self) -> Iterator[tuple[bytes, list[bytes]]]:
        """The messages that have arrived: (client, frames). A ROUTER reads from its clients in turn."""

    @abstractmethod
    def send(self, identity: bytes, frames: tuple[bytes]) -> None:
        """As `send_to`, to an identity of `receive`."""

    def has_lost_one(self) -> bool:
        """True if a client's connection has ended since the last call."""
        try:
            return os.eventfd_read(self.lost_fd) > 0
        except BlockingIOError:
            return False

    def stop(self) -> None:
        """Stop watching; before the socket's context ends."""
        call_unlocked("zmq_socket_monitor", self.router, None, 0)
        self._thread.join(_STOP_TIMEOUT_S)
        if not self._thread.is_alive():
            os.close(self.lost_fd)

    @abstractmethod
    def _watch(self, monitor: zmq.Socket[bytes]) -> None:
        """The thread, until the monitor is stopped."""


class Listener(ClientListener):
    """The core's socket for clients of this machine. `restore` belongs into every turn, and is cheap."""

    def __init__(self, router: zmq.Socket[bytes], address: str) -> None:
        self._address = address
        self._path = Path(address.removeprefix("ipc://"))
        self._hidden_path = self._path.with_name(f".{self._path.name}")
        self._restore_at = 0.0
        self._is_hidden = False  # for lack of descriptors
        self._name_lock = threading.Lock()  # guards the file's name and `_is_hidden`
        super().__init__(router)

    def receive(self) -> Iterator[tuple[bytes, list[bytes]]]:
        with contextlib.suppress(zmq.Again):
            while True:
                identity, *frames = self.router.recv_multipart(NOBLOCK)
                if not is_remote(identity):  # clients choose their identities: none may pass for remote
                    yield identity, frames

    def send(self, identity: bytes, frames: tuple[bytes]) -> None:
        send_to(self.router, identity, frames)

    def restore(self, now: float) -> None:
        """Bind the address again if its file is gone; looks every CHECK_INTERVAL_S. Monotonic time."""
        if now < self._restore_at:
            return
        self._restore_at = now + CHECK_INTERVAL_S
        with self._name_lock:
            is_lost = not self._is_hidden and not os.path.lexists(self._path)
        if is_lost:
            self._bind()  # without the lock: binding may wait until the thread has read events
            with self._name_lock:
                if self._is_hidden:  # the thread has hidden it meanwhile
                    self._move(self._path, self._hidden_path)

    def _bind(self) -> None:
        """Bind once more. libzmq keeps the old listener, with its connections."""
        try:
            make_socket_folder(self._path)
            call_unlocked("zmq_bind", self.router, self._address.encode())
        except (QuireError, OSError, zmq.ZMQError) as error:
            _log.error("clients cannot come: %s", error)
        else:
            _log.warning("%s was removed; it is made again", self._path)

    # The thread.

    def _watch(self, monitor: zmq.Socket[bytes]) -> None:
        with monitor:
            while True:
                monitor.poll(_RECHECK_MS if self._is_hidden else None)
                self._hide_or_show()  # before events, of which more may come at any time
                events = {event for event, _ in take_events(monitor)}
                if zmq.EVENT_DISCONNECTED in events:
                    os.eventfd_write(self.lost_fd, 1)
                if zmq.EVENT_MONITOR_STOPPED in events:
                    return

    def _hide_or_show(self) -> None:
        fraction = _fraction_left()
        if not self._is_hidden and fraction < _RESERVED_FRACTION:
            self._rename(self._path, self._hidden_path, is_hidden=True)
            _log.error("file descriptors run out: no new client is let in for a while (ulimit -n)")
        elif self._is_hidden and fraction > _REOPEN_FRACTION:
            self._rename(self._hidden_path, self._path, is_hidden=False)
            _log.warning("there are file descriptors for new clients again")

    def _rename(self, old: Path, new: Path, *, is_hidden: bool) -> None:
        with self._name_lock:
            self._is_hidden = is_hidden
            self._move(old, new)

    def _move(self, old: Path, new: Path) -> None:
        with contextlib.suppress(FileNotFoundError):  # somebody has removed it
            os.rename(old, new)


def call_unlocked(name: str, socket: zmq.Socket[bytes], *args: bytes | int | None) -> None:
    """Call libzmq without the interpreter's lock. Raises ZMQError."""
    if getattr(_load_libzmq(), name)(ctypes.c_void_p(socket.underlying), *args):
        raise zmq.ZMQError(ctypes.get_errno())


@functools.cache
def _load_libzmq() -> ctypes.CDLL:
    """pyzmq's own copy: a symbol looked up in its module is found in the libraries that this is linked to."""
    return ctypes.CDLL(importlib.import_module("zmq.backend.cython._zmq").__file__, use_errno=True)


def take_events(monitor: zmq.Socket[bytes]) -> list[tuple[int, int]]:
    """Events that have come, and the descriptor of each; so many at most that other work goes on."""
    events: list[tuple[int, int]] = []
    with contextlib.suppress(zmq.Again):
        for _ in range(_MAX_EVENTS):
            events.append(receive_event(monitor))
    return events


def _fraction_left() -> float:
    """The part of this process's file descriptors that is free."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1.0 if limit == resource.RLIM_INFINITY else 1.0 - _count_open() / limit


def _count_open() -> int:
    """Linux 6.2 and later give the count. Listing the folder releases the GIL once for each entry."""
    return os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd"))
