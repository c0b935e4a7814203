"""Addresses of the form tcp://HOST:PORT, and the sockets that listen there.

No daemon's name has this form. The supervisor owns the listening sockets, which outlive every core.
"""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path
from typing import NamedTuple

from ..errors import ConfigError
from .keys import read_server_keys

SCHEME = "tcp://"
MAX_PORT = 65535
_FORM = "tcp://HOST:PORT, such as tcp://192.0.2.7:5757 or tcp://[2001:db8::7]:5757"


class TcpAddress(NamedTuple):
    """A host by name or number, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{SCHEME}{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def shift(self, count: int) -> TcpAddress:
        """The address `count` ports on, for an engine of a group. Port 0 (any free one) stays."""
        return self._replace(port=self.port + count) if self.port else self


def is_tcp(name: str) -> bool:
    """Whether an engine's name is an address, and not a daemon's name."""
    return name.startswith(SCHEME)


def parse_tcp_address(field: str, text: str, *, is_listening: bool = False) -> TcpAddress:
    """Read an address. Port 0 (any free one) is for listening only. Raises ConfigError naming `field`."""
    host, colon, port_text = text.removeprefix(SCHEME).rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if is_bracketed else host
    is_whole = is_tcp(text) and colon and host and (is_bracketed or ":" not in host)
    if not is_whole or any(character in host for character in "/[]@ "):
        raise ConfigError(field, text, _FORM)
    if host == "*":
        raise ConfigError(field, text, f"{_FORM}; 0.0.0.0 or [::] as HOST for every network of this machine")
    lowest = 0 if is_listening else 1
    if not (port_text.isascii() and port_text.isdigit() and lowest <= int(port_text) <= MAX_PORT):
        raise ConfigError(field, text, f"{_FORM}, with a port from {lowest} to {MAX_PORT}")
    return TcpAddress(host, int(port_text))


BACKLOG = 1024


def check_listening(listen: str | None, keys: str | None) -> TcpAddress | None:
    """Where a daemon is to listen by its options, None if nowhere. Raises ConfigError: never without keys."""
    if listen is None:
        if keys is not None:
            raise ConfigError("keys", keys, "only with listen, an address tcp://HOST:PORT")
        return None
    address = parse_tcp_address("listen", listen, is_listening=True)
    if keys is None:
        raise ConfigError("keys", None, "the folder of its keys with listen; `quire keys make DIR` makes one")
    read_server_keys(Path(keys))
    return address


def open_listener(address: TcpAddress) -> socket.socket:
    """A socket that listens there, for one core after another. Raises ConfigError if it cannot be had.

    A client that connects while there is no core waits in the backlog, until no process holds the socket.
    """
    if address.port > MAX_PORT:  # getaddrinfo would wrap it
        raise ConfigError("listen", str(address), f"a port up to {MAX_PORT}; engines have ports in a row")
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise ConfigError("listen", str(address), f"an address of this machine ({error})") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ended connections keep the address
        listener.bind(place)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        allowed = f"an address of this machine with a free port ({error.strerror})"
        raise ConfigError("listen", str(address), allowed) from None
    listener.setblocking(False)
    return listener


def open_everywhere() -> socket.socket:
    """A socket that listens on a free port of all of this machine's addresses. Raises ConfigError."""
    if not socket.has_dualstack_ipv6():
        return open_listener(TcpAddress("0.0.0.0", 0))
    listener = socket.create_server(("::", 0), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
    listener.setblocking(False)
    return listener


def read_place(listener: socket.socket) -> TcpAddress:
    """Where a socket listens."""
    return TcpAddress(*listener.getsockname()[:2])
