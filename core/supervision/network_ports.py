"""NetworkPorts: the TCP ports of a daemon's engines for clients of other machines, one after another."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

from ...ipc.errors import ConfigError
from ...ipc.network.keys import read_server_keys
from ...ipc.network.tcp_address import BACKLOG, TcpAddress, open_listener, parse_tcp_address, read_place
from ...ipc.processes.child_args import NetworkArgs

_NUM_TRIES = 20  # for free ports in a row
_log = logging.getLogger(__name__)


class NetworkPorts:
    """Listening sockets for one core after the other: whoever comes between two waits for the next.

    Engine K listens at the port of `address` + K. A core that replaces a lost one has the keys of that one,
    whatever has become of their files.
    """

    def __init__(self, listen: str, keys: str, num_engines: int) -> None:
        """Check the keys and listen for so many. Raises ConfigError."""
        self._keys = keys
        self._server = read_server_keys(Path(keys))
        self._listeners: dict[int, socket.socket] = {}
        self._refusing: set[int] = set()
        self.address = parse_tcp_address("listen", listen, is_listening=True)
        is_any = self.address.port == 0
        for left in reversed(range(_NUM_TRIES if is_any else 1)):
            try:
                self._open_all(num_engines)
                return
            except ConfigError:
                self.close()
                if not left:
                    raise
                self.address = self.address._replace(port=0)

    def open(self, index: int) -> NetworkArgs:
        """What the cores of this engine are started with. Raises ConfigError if its port is not free."""
        listener = self._listeners.get(index)
        if listener is None:
            listener = self._listeners[index] = open_listener(self.address.shift(index))
        return NetworkArgs(listening_fd=listener.fileno(), keys=self._keys, server=self._server)

    def renew_keys(self) -> None:
        """Read the daemon's own keys again, for cores to come. Files that cannot be used change nothing."""
        try:
            self._server = read_server_keys(Path(self._keys))
        except ConfigError as error:
            _log.warning("the keys of before go on: %s", error)

    def refuse_at(self, indexes: set[int]) -> None:
        """Who comes to these engines is refused, instead of waiting for a core; at all others it waits."""
        for index in self._listeners.keys() & (indexes - self._refusing):
            self._listeners[index].shutdown(socket.SHUT_RDWR)
        for index in self._listeners.keys() & (self._refusing - indexes):
            self._listeners[index].listen(BACKLOG)  # its port was not given back
        self._refusing = indexes

    def close_one(self, index: int) -> None:
        """The engine is gone for good: who comes is refused."""
        self._listeners.pop(index).close()

    def close(self) -> None:
        """All of them."""
        for listener in self._listeners.values():
            listener.close()
        self._listeners.clear()

    def _open_all(self, num_engines: int) -> None:
        self.open(0)
        self.address = TcpAddress(self.address.host, read_place(self._listeners[0]).port)
        for index in range(1, num_engines):
            self.open(index)
