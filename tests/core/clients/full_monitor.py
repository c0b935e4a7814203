"""Has a Listener bind again, or stop, while libzmq waits for its reader: `full_monitor.py ADDRESS WHAT`.

A process of its own, which can be killed when that never returns. WHAT is "restore" or "stop".
"""

from __future__ import annotations

import resource
import socket
import sys
import threading
import time
from pathlib import Path

import zmq
from quire.core.clients import listener as module

_MAX_OPEN_FILES = 4096  # of which the connections take so many that the name is to be hidden as well
_BACKLOG = 10
_MAX_UNREAD = 1001  # events that wait for a reader
_RETRY_S = 0.001


def main() -> None:
    """Ends when it is done."""
    address, what = sys.argv[1:]
    path = Path(address.removeprefix("ipc://"))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (_MAX_OPEN_FILES, hard))
    sys.setswitchinterval(1000.0)  # a thread gets the interpreter when another one gives it away only
    may_read = threading.Event()
    take = module.take_events
    module.take_events = lambda monitor: take(monitor) if may_read.wait() else []

    class Router(zmq.Socket[bytes]):
        """Lets the reader go just before libzmq is called."""

        @property
        def underlying(self) -> int:
            may_read.set()
            return super().underlying

    router = Router(zmq.Context(), zmq.ROUTER)
    router.setsockopt(zmq.BACKLOG, _BACKLOG)
    router.bind(address)
    listener = module.Listener(router, address)
    connections = [_connect(path) for _ in range(_MAX_UNREAD + 1 + _BACKLOG + 1)]
    if what == "restore":
        path.unlink()
        listener.restore(time.monotonic())
    listener.stop()
    assert not listener._thread.is_alive()
    assert not path.exists(), "it is hidden, for there are few descriptors left"
    assert connections
    router.close(linger=0)
    router.context.term()


def _connect(path: Path) -> socket.socket:
    """As soon as there is room among those that wait to be accepted."""
    connection = socket.socket(socket.AF_UNIX)
    connection.setblocking(False)
    while True:
        try:
            connection.connect(str(path))
        except BlockingIOError:
            time.sleep(_RETRY_S)
        else:
            return connection


if __name__ == "__main__":
    main()
