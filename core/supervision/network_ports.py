"""NetworkPorts: the TCP ports of a daemon's engines, for clients of other machines."""

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
    """Listening sockets that outlive cores: a client that comes between two cores waits for the next one.

    Engine K listens at the port of `address` + K. A core that replaces a lost one gets the same keys,
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
        """The arguments for this engine's cores. Raises ConfigError if its port is not free."""
        listener = self._listeners.get(index)
        if listener is None:
            listener = self._listeners[index] = open_listener(self.address.shift(index))
        return NetworkArgs(listening_fd=listener.fileno(), keys=self._keys, server=self._server)

    def renew_keys(self) -> None:
        """Read the daemon's keys again, for the next cores. With unusable files the old keys stay."""
        try:
            self._server = read_server_keys(Path(self._keys))
        except ConfigError as error:
            _log.warning("the keys of before go on: %s", error)

    def refuse_at(self, indexes: set[int]) -> None:
        """Refuse connections to these engines; at all others they wait for a core."""
        for index in self._listeners.keys() & (indexes - self._refusing):
            self._listeners[index].shutdown(socket.SHUT_RDWR)
        for index in self._listeners.keys() & (self._refusing - indexes):
            self._listeners[index].listen(BACKLOG)  # its port was not given back
        self._refusing = indexes

    def close_one(self, index: int) -> None:
        """Refuse connections to an engine that is gone for good."""
        self._listeners.pop(index).close()

    def close(self) -> None:
        """Close all ports."""
        for listener in self._listeners.values():
            listener.close()
        self._listeners.clear()

    def _open_all(self, num_engines: int) -> None:
        self.open(0)
        self.address = TcpAddress(self.address.host, read_place(self._listeners[0]).port)
        for index in range(1, num_engines):
            self.open(index)
