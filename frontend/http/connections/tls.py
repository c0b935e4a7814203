"""TLS on a server's connections. A handshake has a place among the connections, and a limit of time.

asyncio's own TLS server would tell of a connection when its handshake is over: those that are held open would
be bounded by nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
from collections.abc import Callable
from typing import cast

from ....ipc.errors import ConfigError
from ..options import TlsOptions
from .connection import Connection
from .listener import Listener

REFRESH_S = 5.0  # between looks at the files
_TELL_S = 60.0  # between lines on handshakes that failed
_CLOSE_S = 1.0  # for the client's last word
_WRITE_BUFFER_BYTES = 2**16  # as without TLS, whose own default is eight times that for each slow reader
_VERIFY_MODES = (ssl.CERT_NONE, ssl.CERT_OPTIONAL, ssl.CERT_REQUIRED)
_logger = logging.getLogger("quire.serve")


def make_tls_context(options: TlsOptions) -> ssl.SSLContext:
    """Raises ConfigError for a file that cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if options.cert_reqs not in _VERIFY_MODES:
        raise ConfigError(
            "ssl_cert_reqs", options.cert_reqs, "0 (no certificate of clients), 1 or 2 (needed)"
        )
    if options.cert_reqs == ssl.CERT_REQUIRED and options.ca_certs is None:
        raise ConfigError("ssl_ca_certs", None, f"a PEM file, beside ssl_cert_reqs={options.cert_reqs}")
    for field, path in (
        ("ssl_certfile", options.certfile),
        ("ssl_keyfile", options.keyfile),
        ("ssl_ca_certs", options.ca_certs),
    ):
        if path is not None:
            _read(field, path, 1)
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


def read_tls_files(options: TlsOptions) -> tuple[bytes, bytes, bytes | None]:
    """Key, certificate and authorities in PEM, for a library that reads no files.

    Raises ConfigError for one that cannot be read.
    """
    certificate = _read("ssl_certfile", options.certfile)
    key = certificate if options.keyfile is None else _read("ssl_keyfile", options.keyfile)
    return key, certificate, None if options.ca_certs is None else _read("ssl_ca_certs", options.ca_certs)


class TlsFiles:
    """The context of new connections, made of files that may be replaced while the server runs."""

    def __init__(self, options: TlsOptions) -> None:
        """Raises ConfigError for a file that cannot be used."""
        self._options = options
        self._seen = self._look()
        self.context = make_tls_context(options)

    def refresh(self) -> bool:
        """Read files that have changed since; a context that cannot be made of them leaves the old one.

        True when there is another context.
        """
        seen = self._look()
        if seen == self._seen:
            return False
        self._seen = seen
        try:
            self.context = make_tls_context(self._options)
            _logger.info("the certificate was read again: %s", self._options.certfile)
            return True
        except ConfigError as error:
            _logger.warning("the certificate of before goes on: %s", error)
            return False

    def _look(self) -> list[tuple[int, int, int] | None]:
        options = self._options
        return [_look_at(path) for path in (options.certfile, options.keyfile, options.ca_certs) if path]


class TlsListener(Listener):
    """Hands each connection over when its handshake is done, which clients begin in turn.

    Who speaks plain HTTP is told so.
    """

    def __init__(
        self,
        listening_socket: socket.socket,
        make_protocol: Callable[[], Connection],
        options: TlsOptions,
        handshake_s: float,
    ) -> None:
        """Raises ConfigError for a file that cannot be used."""
        self._files = TlsFiles(options)
        self._handshake_s = handshake_s
        self._tell_at = 0.0  # when a failure is logged again
        super().__init__(listening_socket, make_protocol)
        self._refreshing = self._loop.create_task(self._refresh()) if options.refreshes else None

    def close(self) -> None:
        if self._refreshing is not None:
            self._refreshing.cancel()
        super().close()

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            self._files.refresh()

    async def _open(self, client: socket.socket, address: object, /) -> None:
        protocol = self._make_protocol()
        host = str(cast(tuple[object, ...], address)[0]) if isinstance(address, tuple) else ""
        if not protocol.begin_handshake(cast(asyncio.Transport, Handshake(client)), host):
            client.close()
            return
        try:
            async with asyncio.timeout(self._handshake_s):
                if (await self._peek(client)).isalpha():  # a method
                    protocol.refuse_plain_http()
                    await self._loop.connect_accepted_socket(lambda: protocol, client)
                    return
                await protocol.wait_for_handshake()
            transport, _ = await self._loop.connect_accepted_socket(
                lambda: protocol,
                client,
                ssl=self._files.context,
                ssl_handshake_timeout=self._handshake_s,
                ssl_shutdown_timeout=_CLOSE_S,
            )
            transport.set_write_buffer_limits(_WRITE_BUFFER_BYTES)
        except (OSError, asyncio.CancelledError) as error:  # ssl.SSLError and TimeoutError are OSErrors
            protocol.connection_lost(None)
            client.close()
            if isinstance(error, ssl.SSLError) and self._loop.time() >= self._tell_at:
                self._tell_at = self._loop.time() + _TELL_S
                _logger.warning("a TLS handshake of %s failed: %s", host or "a local client", error)

    async def _peek(self, client: socket.socket) -> bytes:
        """The first byte of what a client says, which stays to be read. ConnectionError if it has left."""
        begun = asyncio.Event()
        self._loop.add_reader(client, begun.set)
        try:
            await begun.wait()
        finally:
            self._loop.remove_reader(client)
        if not (first := client.recv(1, socket.MSG_PEEK)):
            raise ConnectionAbortedError
        return first


class Handshake:
    """A connection as its protocol sees it before it is encrypted: something to be cut off."""

    def __init__(self, client: socket.socket) -> None:
        self._client = client

    def abort(self) -> None:
        """Have the handshake fail."""
        with contextlib.suppress(OSError):
            self._client.shutdown(socket.SHUT_RDWR)


def _read(field: str, path: str, size: int = -1) -> bytes:
    """The first `size` bytes; all of them by default."""
    try:
        with open(path, "rb") as file:
            return file.read(size)
    except OSError as error:
        raise ConfigError(field, path, f"a file that can be read ({error.strerror})") from None


def _look_at(path: str) -> tuple[int, int, int] | None:
    """What is another when a file is another; None where there is none."""
    try:
        status = os.stat(path)  # of what a link leads to, as Kubernetes replaces its secrets
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def _refuse_password() -> str:
    raise OSError("it has a password")
