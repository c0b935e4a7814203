"""What a stress run does besides asking well: storms of connections that break, and bytes that mean nothing.

Nobody waits for answers to any of it. That it costs the others nothing is what the checks of the run show.
"""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from urllib.parse import urlsplit

import msgspec
import zmq

from ...frontend.client.remote_daemon import RemoteDaemon
from ...ipc.daemon.daemon_state import CLIENT_SOCKET_NAME, read_state
from ...ipc.daemon.run_dir import find_named
from ...ipc.network.keys import ClientKeys
from ...ipc.network.tcp_address import parse_tcp_address
from ...ipc.protocol.sockets import connect_dealer, make_ipc_address
from ..bench.http_stream import Endpoint
from .beside import Beside
from .site import Site

_STORM_SIZE = 12
_TIMEOUT_S = 2.0
_TIMEOUT_MS = 2000  # to send one message
_JUNK_TIMEOUT_MS = 200
_NUM_FRAMES = 20
_MAX_JUNK_BYTES = 2000
_MAX_STRANGERS = 16
_GREETING = b"\xff" + 8 * b"\0" + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + 32 * b"\0"  # of ZMTP
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing resets the connection


class Noise(Beside):
    """Makes noise, and counts it."""

    period_s = 1.0

    def __init__(self, site: Site, seed: int) -> None:
        super().__init__()
        self._site = site
        self._rng = random.Random(f"noise/{seed}")
        self._strangers: list[socket.socket] = []
        self.num_connections = 0
        self.num_junk_messages = 0

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        for stranger in self._strangers:
            stranger.close()

    def act(self) -> None:
        self._storm()
        self._send_junk_over_http()
        if isinstance(self._site.attachment, RemoteDaemon):
            self._send_junk_over_network(self._site.attachment.address)
        self.num_junk_messages += send_junk_to_core(self._site.daemon, self._rng)

    def _connect(self, speaks_tls: bool = True) -> socket.socket:
        """speaks_tls: if the server does."""
        url = urlsplit(self._site.url)
        connection = socket.create_connection((url.hostname or "", url.port or 0), _TIMEOUT_S)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.num_connections += 1
        if self._site.tls is not None and speaks_tls:
            return self._site.tls.wrap_socket(connection, server_hostname=url.hostname)
        return connection

    def _storm(self) -> None:
        """Many requests whose connections are all reset after the first bytes of the first answer."""
        body = {"model": self._site.model, "prompt": "Storm", "max_tokens": 300, "stream": True}
        request = Endpoint.parse(self._site.url, None).encode_request(
            "POST", "/v1/completions", msgspec.json.encode(body)
        )
        with ExitStack() as stack, suppress(OSError):
            connections = [stack.enter_context(self._connect()) for _ in range(_STORM_SIZE)]
            for connection in connections:
                connection.sendall(request)
            connections[0].recv(1)

    def _send_junk_over_http(self) -> None:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 30\r\n\r\n"
        for data, speaks_tls in (
            (_draw_junk(self._rng), False),
            (head + _draw_junk(self._rng), True),
            (head[: self._rng.randrange(len(head))], True),
        ):
            with suppress(OSError), self._connect(speaks_tls) as connection:
                connection.sendall(data)

    def _send_junk_over_network(self, address: str) -> None:
        """Strangers at the engines' port: half of them say nothing until they are cut off."""
        host, port = parse_tcp_address("attach", address)
        with suppress(OSError):
            for data in (_draw_junk(self._rng), _GREETING + _draw_junk(self._rng), _GREETING[:11], b""):
                self._strangers.append(socket.create_connection((host, port), _TIMEOUT_S))
                self._strangers[-1].sendall(data)
                self.num_connections += 1
        while len(self._strangers) > _MAX_STRANGERS:
            self._strangers.pop(0).close()


def send_junk_to_core(daemon: str, rng: random.Random) -> int:
    """Messages without meaning to one of a daemon's cores; returns how many have gone."""
    directory = find_named(daemon)
    state = read_state(directory)
    names = [engine.socket for engine in state.engines] if state is not None else [CLIENT_SOCKET_NAME]
    address = make_ipc_address(str(directory / rng.choice(names)))
    num_sent = 0
    with open_dealer(address, timeout_ms=_JUNK_TIMEOUT_MS, linger_ms=_JUNK_TIMEOUT_MS) as dealer:
        for _ in range(_NUM_FRAMES):
            with suppress(zmq.Again):  # the core may be dead just now
                dealer.send_multipart([_draw_junk(rng) for _ in range(rng.randint(1, 3))])
                num_sent += 1
    return num_sent


@contextmanager
def open_dealer(
    address: str, keys: ClientKeys | None = None, *, timeout_ms: int = _TIMEOUT_MS, linger_ms: int = 0
) -> Generator[zmq.Socket[bytes]]:
    """A socket to an engine core, that sends for `timeout_ms` at most."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.sndtimeo = timeout_ms
    try:
        yield connect_dealer(dealer, address, keys=keys)
    finally:
        dealer.close(linger=linger_ms)
        context.term()


def _draw_junk(rng: random.Random) -> bytes:
    return rng.randbytes(rng.randint(0, _MAX_JUNK_BYTES))
