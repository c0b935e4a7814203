"""TLS on the port of the gRPC API: the certificate that HTTP has, read again as there."""

from __future__ import annotations

import contextlib
import ssl

import grpc

from ...ipc.errors import ConfigError
from ..openai.connections.tls import TlsFiles, read_tls_files
from ..openai.options import TlsOptions


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
