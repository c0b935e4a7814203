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
        self.num_accepted = 0
        self._gates: list[threading.Event] = []  # the last is that of new connections
        self._sockets = [self._listener]
        self._threads: list[threading.Thread] = []
        self._add_gate()
        self._start(self._accept)

    def cut(self) -> None:
        """End every connection; new ones are made."""
        for one in self._sockets[1:]:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def strand(self) -> None:
        """Hand nothing on over connections that stand, and say nothing of it; new ones are well."""
        self._gates[-1].clear()
        self._add_gate()

    def close(self) -> None:
        for gate in self._gates:
            gate.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self.cut()
        for thread in self._threads:
            thread.join(5.0)
        for one in self._sockets:
            one.close()

    def _add_gate(self) -> None:
        self._gates.append(threading.Event())
        self._gates[-1].set()

    def _start(self, action: Callable[[], None]) -> None:
        thread = threading.Thread(target=action, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self.num_accepted += 1
                far = socket.create_connection(self._target)
                gate = self._gates[-1]
                self._sockets += (near, far)
                self._start(lambda near=near, far=far, gate=gate: _hand_on(near, far, gate))
                self._start(lambda near=near, far=far, gate=gate: _hand_on(far, near, gate))


def _hand_on(source: socket.socket, sink: socket.socket, gate: threading.Event) -> None:
    with contextlib.suppress(OSError):
        while piece := source.recv(_PIECE):
            gate.wait()
            sink.sendall(piece)
        gate.wait()
    for one in (source, sink):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
