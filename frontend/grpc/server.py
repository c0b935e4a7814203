"""GrpcServer: the port of the gRPC API in an HTTP process. Knows no requests: what is called is calls.py's.

gRPC's core reads sockets in threads of its own; everything else runs in the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import ssl
from typing import Any

import grpc
import grpc.aio

from ...ipc.errors import ConfigError
from ..http.connections.tls import TlsFiles, read_tls_files
from ..http.engines.served_models import ServedModels
from ..http.observe.access_log import AccessLog
from ..http.options import ServerOptions, TlsOptions, find_max_grpc_connections
from .calls import CallHandler, find_max_message_bytes
from .engine_service import EngineService, HealthService

_MAX_STREAMS = 1024  # calls under way on one connection; more wait at the client
_FLUSH_GRACE_S = 1.0  # for the last answers on their way


class GrpcServer:
    """One a process. `start` it in the event loop that serves; `drain`, then `close` at the end."""

    def __init__(
        self,
        models: ServedModels,
        address: str,
        tasks: set[asyncio.Task[None]],
        access_log: AccessLog | None = None,
    ) -> None:
        """address: 'HOST:PORT', which others may share (SO_REUSEPORT). `tasks`: holds the calls under way.
        access_log: gets a line a call; its owner starts and closes it.
        """
        options = models.parts.options
        self._address, self._tls = address, options.tls
        self._server = grpc.aio.server(
            options=_make_options(options), maximum_concurrent_rpcs=options.limits.max_connections
        )
        handler = CallHandler(options, tasks, access_log)
        self._health = HealthService(models)
        for service in (EngineService(models), self._health):
            calls = service.methods.items()
            methods = {name: handler.wrap(method, f"/{service.name}/{name}") for name, method in calls}
            self._server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(service.name, methods),)
            )
        self._draining: asyncio.Task[None] | None = None
        self.port = 0  # known after `start`

    async def start(self) -> None:
        """Listen. Raises ConfigError for an address or a certificate that cannot be used."""
        credentials = None if self._tls is None else make_credentials(self._tls)
        try:
            if credentials is None:
                self.port = self._server.add_insecure_port(self._address)
            else:
                self.port = self._server.add_secure_port(self._address, credentials)
        except RuntimeError as error:
            raise ConfigError("grpc_port", self._address, f"an address that is free ({error})") from None
        await self._server.start()

    def drain(self, grace_s: float) -> None:
        """Take no new connections and tell clients to go elsewhere; what runs after `grace_s` is cut off."""
        self._health.close()
        self._draining = asyncio.ensure_future(self._server.stop(grace_s))

    async def close(self) -> None:
        """Let what has been answered reach its reader; cut off what still runs. Idempotent."""
        await self._server.stop(_FLUSH_GRACE_S)
        if self._draining is not None:
            await self._draining


def _make_options(options: ServerOptions) -> list[tuple[str, Any]]:
    """gRPC's own bounds on what a peer may cost before, and besides, its calls."""
    limits = options.limits
    max_open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return [
        ("grpc.so_reuseport", 1),
        ("grpc.max_allowed_incoming_connections", find_max_grpc_connections(max_open_files)),
        ("grpc.max_concurrent_streams", _MAX_STREAMS),
        ("grpc.max_receive_message_length", find_max_message_bytes(limits)),
        ("grpc.max_metadata_size", 8192),  # gRPC's own default; past it calls begin to be refused
        ("grpc.absolute_max_metadata_size", 16384),
        ("grpc.server_handshake_timeout_ms", int(limits.max_header_s * 1000)),
        ("grpc.max_connection_idle_ms", int(limits.max_keep_alive_s * 1000)),
        # A peer that is gone without a word is found out by its silence.
        ("grpc.keepalive_time_ms", int(limits.max_keep_alive_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(limits.max_header_s * 1000)),
        # Else the window in which bytes come before anybody asks for them grows to megabytes.
        ("grpc.http2.bdp_probe", 0),
    ]


def make_credentials(options: TlsOptions) -> grpc.ServerCredentials:
    """Raises ConfigError for a file that cannot be used."""
    files = TlsFiles(options)

    def find_new() -> grpc.ServerCertificateConfiguration | None:
        # gRPC asks in a thread of its own, before each handshake; None leaves what it has.
        with contextlib.suppress(ConfigError):  # it is being replaced again: there is another look to come
            return _configure(options) if options.refreshes and files.refresh() else None

    needs_certificate = options.cert_reqs == ssl.CERT_REQUIRED
    return grpc.dynamic_ssl_server_credentials(
        _configure(options),
        find_new,  # pyright: ignore[reportArgumentType] - its stubs leave None out
        needs_certificate,
    )


def _configure(options: TlsOptions) -> grpc.ServerCertificateConfiguration:
    key, certificate, authorities = read_tls_files(options)
    return grpc.ssl_server_certificate_configuration([(key, certificate)], authorities)
