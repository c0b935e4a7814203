"""HandshakeWatch: why a connection over TCP is not made, from what libzmq's monitor says.

libzmq tries again for ever, whatever the cause. What can change by itself is waited for: a network that is
down, an engine that is being restarted (the supervisor holds the port meanwhile). What cannot ends the
client: another key, another protocol, a port at which nobody listens.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import socket
import time
from collections.abc import Callable, Iterable

import zmq

from ...ipc.errors import ConfigError
from ...ipc.network.tcp_address import parse_tcp_address

# A port that refuses connections for so long has no daemon any more.
REFUSED_TIMEOUT_S = 5.0
UNREACHABLE_TIMEOUT_S = 15.0  # of one that was never reached
_MAX_BROKEN = 5  # handshakes in a row that ended without a word, before any that did not
_BROKEN_TIMEOUT_S = 1.0

FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_CLOSED  # an attempt to connect has failed
)


class HandshakeWatch:
    """Told of every event of one socket's monitor. `failure` says why there will be no connection."""

    def __init__(
        self, address: str, clock: Callable[[], float] = time.monotonic, probe: ConnectProbe | None = None
    ) -> None:
        """Raises ConfigError for a host that is not known. Without `probe` it may wait for a name server."""
        self.failure: str | None = None
        self._address = address
        self._clock = clock
        self._probe = probe or ConnectProbe(address)
        self._beside: dict[int, ConnectProbe] = {}  # other ports of the host
        self._was_reached = False
        self._num_broken = 0
        self._broken_since = 0.0
        self._failing_since: float | None = None
        self._refused_since: float | None = None

    def note(self, event: int) -> None:
        """Something has happened."""
        match event:
            case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._was_reached = True
                self._num_broken, self._failing_since, self._refused_since = 0, None, None
                self.close()
            case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._fail("does not know this client: client.public is not in the daemon's file `clients`")
            case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                self._fail("is no Quire daemon's port for clients with keys, or speaks another protocol")
            case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self._note_broken()
            case zmq.EVENT_CLOSED:
                self._note_unreached()
            case _:
                pass

    def make_sibling(self, address: str) -> HandshakeWatch:
        """For another port of the same host, which is not looked up again: an event loop calls this."""
        return HandshakeWatch(
            address, self._clock, self._probe.shift(parse_tcp_address("attach", address).port)
        )

    def find_open_ports(self, ports: Iterable[int]) -> list[int]:
        """Those ports of the same host that have accepted connections of the last call. Never waits."""
        open_ports = [port for port, probe in self._beside.items() if probe.has_connected]
        self._close_beside()
        self._beside = {port: self._probe.shift(port) for port in ports}
        for probe in self._beside.values():
            probe.ask()
        return open_ports

    def close(self) -> None:
        """Nothing more is asked of the network."""
        self._probe.close()
        self._close_beside()

    def _close_beside(self) -> None:
        for probe in self._beside.values():
            probe.close()
        self._beside.clear()

    def _fail(self, why: str) -> None:
        self.failure = self.failure or f"{self._address} {why}"

    def _note_broken(self) -> None:
        """A daemon with another key ends the connection without a word; so does one that is just killed."""
        now = self._clock()
        if not self._num_broken:
            self._broken_since = now
        self._num_broken += 1
        is_long = now - self._broken_since >= _BROKEN_TIMEOUT_S
        if not self._was_reached and self._num_broken >= _MAX_BROKEN and is_long:
            self._fail("ends every connection: server.public is not its key, or it is no Quire daemon's port")

    def _note_unreached(self) -> None:
        now, error = self._clock(), self._probe.ask()
        if self._failing_since is None:
            self._failing_since = now
        if error != errno.ECONNREFUSED:
            self._refused_since = None
        elif self._refused_since is None:
            self._refused_since = now
        if self._refused_since is not None and now - self._refused_since >= REFUSED_TIMEOUT_S:
            self._fail("has no daemon: connection refused")
        elif not self._was_reached and now - self._failing_since >= UNREACHABLE_TIMEOUT_S:
            self._fail(f"cannot be reached: {os.strerror(error) if error else 'no answer'}")


class ConnectProbe:
    """Connects beside libzmq, which does not say why it could not. Never waits."""

    def __init__(self, address: str) -> None:
        """Raises ConfigError for a host that is not known. May wait for a name server."""
        host, port = parse_tcp_address("attach", address)
        try:
            self._family, _, _, _, self._place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        except (OSError, UnicodeError) as error:
            raise ConfigError("attach", address, f"an address whose host is known ({error})") from None
        self._attempt: socket.socket | None = None

    def shift(self, port: int) -> ConnectProbe:
        """For another port of the same host."""
        other = copy.copy(self)
        other._place, other._attempt = (self._place[0], port, *self._place[2:]), None
        return other

    def ask(self) -> int:
        """How the attempt has ended that the last call began, as an errno; 0 if it has not, or went well."""
        error = 0
        with contextlib.suppress(OSError):
            if self._attempt is not None:
                error = self._attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            self.close()
            self._attempt = socket.socket(self._family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            begun = self._attempt.connect_ex(self._place)
            error = error or (0 if begun == errno.EINPROGRESS else begun)
        return error

    @property
    def has_connected(self) -> bool:
        """Whether the attempt that is under way has gone well."""
        with contextlib.suppress(OSError):
            return self._attempt is not None and bool(self._attempt.getpeername())
        return False

    def close(self) -> None:
        """End the attempt that is under way."""
        if self._attempt is not None:
            self._attempt.close()
            self._attempt = None
