"""Addresses of the form tcp://HOST:PORT: as they are written. The name of a daemon is never one."""

from __future__ import annotations

import ipaddress
from typing import NamedTuple

from ..errors import ConfigError

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
        """The address `count` ports on: an engine of a group listens there. Port 0 stays: any free one."""
        return self._replace(port=self.port + count) if self.port else self


def is_tcp(name: str) -> bool:
    """Whether an engine is named by an address and not by a daemon's name."""
    return name.startswith(SCHEME)


def parse_tcp_address(field: str, text: str, *, is_listening: bool = False) -> TcpAddress:
    """Read an address. Port 0 (any free one) is only for who listens. Raises ConfigError naming `field`."""
    host, colon, port_text = text.removeprefix(SCHEME).rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if is_bracketed else host
    is_whole = is_tcp(text) and colon and host and (is_bracketed or ":" not in host)
    if not is_whole or any(one in host for one in "/[]@ "):
        raise ConfigError(field, text, _FORM)
    if host == "*":
        raise ConfigError(field, text, f"{_FORM}; 0.0.0.0 or [::] as HOST for every network of this machine")
    lowest = 0 if is_listening else 1
    if not (port_text.isascii() and port_text.isdigit() and lowest <= int(port_text) <= MAX_PORT):
        raise ConfigError(field, text, f"{_FORM}, with a port from {lowest} to {MAX_PORT}")
    return TcpAddress(host, int(port_text))
