"""TcpProxy: a network between two TCP sockets that a test can cut, or make silent."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

_PIECE = 65536


class TcpProxy:
    """Listens on a port of its own and hands on to `target`, both ways."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._passes = threading.Event()
        self._passes.set()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._all = [self._listener]
        self.num_accepted = 0
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def cut(self) -> None:
        """End every connection; new ones are made."""
        pairs, self._pairs = self._pairs, []
        for one in [one for pair in pairs for one in pair]:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def silence(self) -> None:
        """Hand nothing on, on connections that stand and on new ones."""
        self._passes.clear()

    def resume(self) -> None:
        """Hand on again. What was sent over a connection before is not lost, as of a cable that was out."""
        self._passes.set()

    def close(self) -> None:
        self.resume()
        self._listener.shutdown(socket.SHUT_RDWR)
        self.cut()
        for thread in self._threads:
            thread.join(5.0)
        for one in self._all:
            one.close()

    def _start(self, target: Callable[..., None], *args: socket.socket) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self.num_accepted += 1
                far = socket.create_connection(self._target)
                self._pairs.append((near, far))
                self._all += (near, far)
                for pair in ((near, far), (far, near)):
                    self._start(self._hand_on, *pair)

    def _hand_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(_PIECE):
                self._passes.wait()
                sink.sendall(piece)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
