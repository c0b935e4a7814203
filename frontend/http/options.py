"""ServerOptions: everything that `run_server` needs besides an engine and a socket. Fit to send."""

from __future__ import annotations

import resource
from typing import Annotated, Literal

import msgspec

from ...ipc.processes.log_lines import LogFormat
from ...ipc.processes.restarts import LOSS_WINDOW_S, MAX_LOSSES
from ...ipc.protocol.engine_views import DEFAULT_METRICS_PREFIX
from ...ipc.spec.options import check_options, option, seconds
from .limits import Limits

UnknownFields = Literal["refuse", "ignore"]
HTTP_CLIENT_KIND = "http"  # what an HTTP process is called where the engine's clients are listed
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
    """Options of one HTTP process; those with a text are options of `quire serve`, which makes the others.

    api_key_hashes: hex sha256 of each key that is let in; empty lets everyone in. server_id: names all of a
    server's processes, where callers have no key. accepts_when_ready: leave
    connections to others on the same socket until the engine answers; else they are answered 503 meanwhile.
    otlp_traces_endpoint: None for nowhere. grpc_address: 'HOST:PORT' of the gRPC API, None without one.
    allowed_hosts: empty: any. has_access_log: a line a request on standard error, but for successes of
    `unlogged_paths`.
    """

    host: Annotated[str, option("address to listen on")] = "127.0.0.1"
    port: Annotated[int, option("port; 0: any free one", 0, 65535)] = 8000
    uds: Annotated[str, option("listen on this Unix socket, in place of host and port")] | None = None
    api_key_hashes: tuple[str, ...] = ()
    max_waiting: Annotated[int, option("sequences that may wait, then 429", 0)] = 2048
    drain_timeout_s: Annotated[
        float, seconds("seconds that running requests get at the end", 0, name="drain_timeout")
    ] = 30.0
    stall_s: Annotated[
        float,
        seconds(
            "/health fails when a request gets no token for so long while the device is free; 0: never", 0
        ),
    ] = 30.0
    max_http_restarts: Annotated[
        int,
        option(
            f"lost HTTP processes of several that are replaced in {LOSS_WINDOW_S:g} s; "
            "one more ends the server",
            0,
        ),
    ] = MAX_LOSSES
    accepts_when_ready: bool = False
    unknown_fields: Annotated[
        UnknownFields, option("of requests: refuse says which; ignore leaves them out, as vLLM does")
    ] = "refuse"
    enable_force_include_usage: Annotated[
        bool, option("tell the usage so far in each chunk of each stream")
    ] = False
    enable_prompt_tokens_details: Annotated[
        bool, option("usage says how many tokens of the prompt were cached, as OpenAI's does")
    ] = True
    enable_tokenizer_info_endpoint: Annotated[
        bool, option("answer /tokenizer_info: the tokenizer's settings and the chat template")
    ] = False
    otlp_traces_endpoint: (
        Annotated[str, option("send a span a request to this OpenTelemetry collector, a URL")] | None
    ) = None
    limits: Limits = Limits()
    grpc_address: str | None = None
    root_path: Annotated[
        str,
        option(
            "what a proxy puts before every path, such as /llm; it is taken away where it comes",
            group="network",
        ),
    ] = ""
    allowed_hosts: tuple[str, ...] = ()
    cors: CorsOptions | None = None
    tls: TlsOptions | None = None
    enable_request_id_headers: Annotated[
        bool, option("every answer has the X-Request-Id of its request, or a new one", group="network")
    ] = False
    has_access_log: bool = False
    unlogged_paths: tuple[str, ...] = ()
    log_level: str = "WARNING"
    log_format: LogFormat = "text"
    metrics_prefix: Annotated[
        str,
        option(
            "what names of the engine's metrics begin with; vllm: for dashboards that you have", group="log"
        ),
    ] = DEFAULT_METRICS_PREFIX
    server_id: str = ""

    def __post_init__(self) -> None:
        check_options(self)
