"""TLS on a server's connections. A handshake has a place among the connections, and a limit of time.

asyncio's own TLS server would tell of a connection when its handshake is over: those that are held open would
be bounded by nothing.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable

from ....ipc.errors import ConfigError
from ..options import TlsOptions
from .protocol import CappedProtocol

_CLOSE_S = 1.0  # for the client's last word
_WRITE_BUFFER_BYTES = 2**16  # as without TLS, whose own default is eight times that for each slow reader
_VERIFY_MODES = (ssl.CERT_NONE, ssl.CERT_OPTIONAL, ssl.CERT_REQUIRED)


def make_tls_context(options: TlsOptions) -> ssl.SSLContext:
    """Raises ConfigError for a file that cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if options.cert_reqs not in _VERIFY_MODES:
        raise ConfigError(
            "ssl_cert_reqs", options.cert_reqs, "0 (no certificate of clients), 1 or 2 (needed)"
        )
    for field, path in (
        ("ssl_certfile", options.certfile),
        ("ssl_keyfile", options.keyfile),
        ("ssl_ca_certs", options.ca_certs),
    ):
        if path is not None:
            _check_readable(field, path)
    try:
        # Without the callback OpenSSL asks the terminal, or whoever reads it.
        context.load_cert_chain(options.certfile, options.keyfile, password=_refuse_password)
    except (ssl.SSLError, OSError) as error:
        allowed = f"a PEM certificate, with its unencrypted key there or in ssl_keyfile ({error})"
        raise ConfigError("ssl_certfile", options.certfile, allowed) from None
    try:
        if options.ca_certs is not None:
            context.load_verify_locations(options.ca_certs)
    except ssl.SSLError as error:
        raise ConfigError("ssl_ca_certs", options.ca_certs, f"PEM certificates ({error})") from None
    context.verify_mode = _VERIFY_MODES[options.cert_reqs]
    context.set_alpn_protocols(["http/1.1"])
    return context


class TlsAcceptor(asyncio.Protocol):
    """One connection until its handshake is over; then `protocol` has it. Made by `create_server`."""

    def __init__(self, context: ssl.SSLContext, protocol: CappedProtocol, handshake_s: float) -> None:
        self._context = context
        self._protocol = protocol
        self._handshake_s = handshake_s
        self._received: list[bytes] = []  # behind the handshake, before `protocol` has the connection
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        if self._protocol.begin_handshake(transport):
            transport.pause_reading()
            self._task = asyncio.get_running_loop().create_task(self._shake_hands(transport))

    def data_received(self, data: bytes) -> None:
        self._received.append(data)

    async def _shake_hands(self, transport: asyncio.Transport) -> None:
        try:
            encrypted = await asyncio.get_running_loop().start_tls(
                transport,
                self,
                self._context,
                server_side=True,
                ssl_handshake_timeout=self._handshake_s,
                ssl_shutdown_timeout=_CLOSE_S,
            )
        except (OSError, asyncio.CancelledError):  # ssl.SSLError and TimeoutError are OSErrors
            encrypted = None
        if encrypted is None or encrypted.is_closing():
            self._protocol.end_handshake()
            transport.abort()
            return
        encrypted.set_write_buffer_limits(_WRITE_BUFFER_BYTES)
        encrypted.set_protocol(self._protocol)
        self._protocol.connection_made(encrypted)
        for data in self._received:
            self._protocol.data_received(data)
        self._received.clear()


def make_tls_factory(
    make_protocol: Callable[[], CappedProtocol], context: ssl.SSLContext, handshake_s: float
) -> Callable[[], asyncio.Protocol]:
    """Makes the protocol of a connection that has just come."""
    return lambda: TlsAcceptor(context, make_protocol(), handshake_s)


def _check_readable(field: str, path: str) -> None:
    try:
        with open(path, "rb") as file:
            file.read(1)
    except OSError as error:
        raise ConfigError(field, path, f"a file that can be read ({error.strerror})") from None


def _refuse_password() -> str:
    raise OSError("it has a password")
