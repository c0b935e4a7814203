"""ServerOptions: everything that `run_server` needs besides an engine and a socket. Fit to send."""

from __future__ import annotations

import resource
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ...ipc.params.param_fields import MAX_INT
from ...ipc.processes.log_lines import LogFormat
from ...ipc.processes.restarts import MAX_LOSSES
from ...ipc.protocol.engine_views import DEFAULT_METRICS_PREFIX
from .limits import Limits

UnknownFields = Literal["refuse", "ignore"]
HTTP_CLIENT_KIND = "http"  # what an HTTP process is called where the engine's clients are listed
DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
DEFAULT_STALL_S = 30.0
_MAX_GRPC_CONNECTIONS = 1024  # of a process; a client needs one, however many calls it makes


def find_max_grpc_connections(max_open_files: int) -> int:
    """Of a process with so many descriptors, of which three in four are for others than strangers here."""
    has_bound = max_open_files != resource.RLIM_INFINITY
    return min(_MAX_GRPC_CONNECTIONS, max_open_files // 4) if has_bound else _MAX_GRPC_CONNECTIONS


class CorsOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which web pages of other origins may ask, and how; '*' is any."""

    origins: tuple[str, ...]
    methods: tuple[str, ...] = ("*",)
    headers: tuple[str, ...] = ("*",)
    allows_credentials: bool = False


class TlsOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Files in PEM. keyfile: None where the certificate's file has the key. cert_reqs: ssl.VerifyMode.

    refreshes: read the files again when they have changed, for connections that begin then.
    """

    certfile: str
    keyfile: str | None = None
    ca_certs: str | None = None
    cert_reqs: int = 0
    refreshes: bool = False


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of one HTTP process; what is not said here is as `quire serve` says of its options.

    api_key_hashes: hex sha256 of each key that is let in; empty lets everyone in. server_id: names all of a
    server's processes, where callers have no key. accepts_when_ready: leave
    connections to others on the same socket until the engine answers; else they are answered 503 meanwhile.
    otlp_traces_endpoint: None for nowhere. grpc_address: 'HOST:PORT' of the gRPC API, None without one.
    allowed_hosts: empty: any. has_access_log: a line a request on standard error, but for successes of
    `unlogged_paths`.
    """

    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    api_key_hashes: tuple[str, ...] = ()
    max_waiting: int = 2048
    drain_timeout_s: float = 30.0
    max_http_restarts: Annotated[int, Meta(ge=0, le=MAX_INT)] = MAX_LOSSES
    accepts_when_ready: bool = False
    otlp_traces_endpoint: str | None = None
    stall_s: Annotated[float, Meta(ge=0.0, le=86400.0)] = DEFAULT_STALL_S
    limits: Limits = Limits()
    grpc_address: str | None = None
    uds: str | None = None
    root_path: str = ""
    allowed_hosts: tuple[str, ...] = ()
    cors: CorsOptions | None = None
    tls: TlsOptions | None = None
    enable_request_id_headers: bool = False
    has_access_log: bool = False
    unlogged_paths: tuple[str, ...] = ()
    log_level: str = "WARNING"
    log_format: LogFormat = "text"
    enable_force_include_usage: bool = False
    unknown_fields: UnknownFields = "refuse"
    enable_tokenizer_info_endpoint: bool = False
    metrics_prefix: str = DEFAULT_METRICS_PREFIX  # of the engine's series
    server_id: str = ""
