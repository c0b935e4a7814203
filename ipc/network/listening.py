"""The socket to which clients of other machines come. Its owner is the supervisor: it outlives every core."""

from __future__ import annotations

import socket
from pathlib import Path

from ..errors import ConfigError
from .keys import read_server_keys
from .tcp_address import MAX_PORT, TcpAddress, parse_tcp_address

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
    """A socket that listens there, for one core after the other. Raises ConfigError if it cannot be had.

    Whoever connects while there is no core waits in its backlog; it is refused once nobody holds the socket.
    """
    if address.port > MAX_PORT:  # which getaddrinfo would take for another one
        raise ConfigError("listen", str(address), f"a port up to {MAX_PORT}; engines have ports in a row")
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise ConfigError("listen", str(address), f"an address of this machine ({error})") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what ended connections left behind
        listener.bind(place)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        allowed = f"an address of this machine with a free port ({error.strerror})"
        raise ConfigError("listen", str(address), allowed) from None
    listener.setblocking(False)
    return listener


def open_everywhere() -> socket.socket:
    """A socket that listens on a free port of all of this machine's addresses, IPv6's too where it has them.

    Raises ConfigError.
    """
    if not socket.has_dualstack_ipv6():
        return open_listener(TcpAddress("0.0.0.0", 0))
    listener = socket.create_server(("::", 0), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
    listener.setblocking(False)
    return listener


def read_place(listener: socket.socket) -> TcpAddress:
    """Where a socket listens."""
    return TcpAddress(*listener.getsockname()[:2])
