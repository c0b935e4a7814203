"""The options of `quire serve`, and ServerOptions made of them. Starts and binds nothing."""

from __future__ import annotations

import argparse
import os
import re
import secrets
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ...ipc.daemon.daemon_state import read_state
from ...ipc.daemon.run_dir import find_named
from ...ipc.errors import ConfigError
from ...ipc.network.tcp_address import is_tcp
from ...ipc.processes.restarts import LOSS_WINDOW_S, MAX_LOSSES
from ..http.connections.listen import is_loopback
from ..options.engine_args import SHARED_MAX_QUEUED_BYTES
from .engine_choice import add_engine_options
from .parser import Parser, add_config_option

if TYPE_CHECKING:  # the server's modules load Starlette, which --help does without
    from ..http.limits import Limits
    from ..http.options import ServerOptions

ENV_KEY = "QUIRE_API_KEY"
_EPILOG = """\
Without options: the model that ships with Quire, on http://127.0.0.1:8000. Another address than this
machine's own needs an API key. SIGTERM (or Ctrl-C) lets running requests finish; a second one does not.
A Grafana board for /metrics (import it there): {board}
"""
_TOKEN = r"[A-Za-z0-9!#$%&'*+.^_`|~-]+"  # RFC 9110
# Expressions of what options may be, and the words for it.
_FORMS = {
    "allowed_hosts": (
        r"\*|(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]+",
        "a name without scheme and port, such as 'x.example' or '*.x.example', an address, or '*'",
    ),
    "allowed_origins": (
        r"\*|null|[a-z][a-z0-9+.-]*://[^\s/*?#@]+",
        "a page's origin, such as 'https://x.example' without a path, or '*'",
    ),
    "allowed_methods": (_TOKEN, "the name of a method, such as GET, or '*'"),
    "allowed_headers": (_TOKEN, "the name of a header, or '*'"),
}
_MAX_KEY_FILE_BYTES = 1 << 20
_BOARD = Path(__file__).parents[2] / "tools" / "grafana" / "quire.json"


def make_parser() -> Parser:
    """Of `quire serve`: the server's options and those of its engine."""
    epilog = _EPILOG.format(board=_BOARD)
    parser = Parser("quire serve", "Serve a model over HTTP, with OpenAI's API.", epilog, " [MODEL]")
    text = "as --model; with --attach it is served as well"
    parser.add_argument("model_name", nargs="?", metavar="MODEL", help=text)
    group = parser.add_argument_group("server options")
    add = group.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    add("--port", type=int, default=8000, metavar="N", help="port (8000); 0: any free one")
    add("--uds", metavar="PATH", help="listen on this Unix socket, in place of host and port")
    add("--api-key", action="append", default=[], metavar="KEY", help="a key to let in (repeatable)")
    add("--api-key-file", metavar="FILE", help="keys to let in, one a line")
    add("--grpc-port", type=int, metavar="N", help="port of the gRPC API (none); 0: any free one")
    add("--insecure-no-key", action="store_true", help="allow another address without a key: anyone gets in")
    add("--max-waiting", type=int, default=2048, metavar="N", help="sequences that may wait (2048), then 429")
    text = "seconds that running requests get at the end (30)"
    add("--drain-timeout", type=float, default=30.0, metavar="S", help=text)
    text = "/health fails when a request gets no token for so long while the device is free (30; 0: never)"
    add("--stall-s", type=float, default=30.0, metavar="S", help=text)
    add("--limit", action="append", default=[], metavar="NAME=VALUE", help="set a limit (repeatable)")
    add("--api-server-count", type=int, default=1, metavar="N", help="HTTP processes on the port (1)")
    add(
        "--max-http-restarts",
        type=int,
        default=MAX_LOSSES,
        metavar="N",
        help=f"lost HTTP processes of several that are replaced in {LOSS_WINDOW_S:g} s "
        f"({MAX_LOSSES}); one more ends the server",
    )
    text = "as vLLM's, without an effect: tools that a request offers may always be called"
    add("--enable-auto-tool-choice", action="store_true", help=text)
    add("--share-port", action="store_true", help="join servers of yours that listen on the port already")
    add("--name", help="what `quire ps` and --attach call the engine (serve-PORT)")
    text = "of requests: refuse (the default) says which; ignore leaves them out, as vLLM does"
    add("--unknown-fields", choices=("refuse", "ignore"), default="refuse", help=text)
    text = "tell the usage so far in each chunk of each stream"
    add("--enable-force-include-usage", action="store_true", help=text)
    text = "answer /tokenizer_info: the tokenizer's settings and the chat template"
    add("--enable-tokenizer-info-endpoint", action="store_true", help=text)
    add("--otlp-traces-endpoint", metavar="URL", help="send a span a request to this OpenTelemetry collector")
    _add_proxy_options(parser)
    _add_log_options(parser)
    add_config_option(parser)
    add("--help-limits", action="store_true", help="show every limit and its value")
    add_engine_options(parser, takes_several=True)
    parser.set_defaults(scheduling_policy="fair", max_queued_bytes=SHARED_MAX_QUEUED_BYTES)
    return parser


def _add_proxy_options(parser: Parser) -> None:
    """What stands between clients and the server: TLS, a proxy, browsers. Names and meaning are vLLM's."""
    add = parser.add_argument_group("network options").add_argument
    add("--ssl-certfile", metavar="FILE", help="serve HTTPS, and gRPC over TLS, with this certificate (PEM)")
    add("--ssl-keyfile", metavar="FILE", help="its key, without a password; default: in the same file")
    add("--ssl-ca-certs", metavar="FILE", help="whose certificates clients may have")
    text = "certificates of clients: 0 not asked for, 1 checked, 2 needed (0)"
    add("--ssl-cert-reqs", type=int, default=0, metavar="N", help=text)
    text = "read these files again when they have changed, for new connections"
    add("--enable-ssl-refresh", action="store_true", help=text)
    text = "what a proxy puts before every path, such as /llm; it is taken away where it comes"
    add("--root-path", default="", metavar="PATH", help=text)
    text = "a name that requests may be for, '*.example.com' too; default: any with an API key"
    add("--allowed-hosts", action="append", default=[], metavar="NAME", help=text)
    text = "where browsers' pages may come from, '*': anywhere (nowhere); as vLLM's it may be a JSON list"
    add("--allowed-origins", action="append", default=[], metavar="ORIGIN", help=text)
    add("--allow-credentials", action="store_true", help="browsers may send cookies along")
    text = "methods of such pages ('*')"
    add("--allowed-methods", action="append", default=[], metavar="METHOD", help=text)
    add("--allowed-headers", action="append", default=[], metavar="NAME", help="headers of such pages ('*')")
    text = "every answer has the X-Request-Id of its request, or a new one"
    add("--enable-request-id-headers", action="store_true", help=text)


def _check_prefix(prefix: str) -> str:
    if not re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", prefix):
        raise ConfigError("metrics_prefix", prefix, "letters, digits, '_' and ':', as in 'vllm:'")
    return prefix


def _add_log_options(parser: Parser) -> None:
    add = parser.add_argument_group("log options").add_argument
    text = "no line for each request (they are there down to --log-level INFO; refusals to WARNING)"
    add("--disable-access-log", "--disable-uvicorn-access-log", action="store_true", help=text)
    text = "what names of the engine's metrics begin with (quire:); vllm: for dashboards that you have"
    add("--metrics-prefix", default="quire:", metavar="TEXT", help=text)
    text = "no line for successes of these paths, as /health,/metrics"
    add("--disable-access-log-for-endpoints", default="", metavar="PATHS", help=text)


def print_limits(limits: Limits) -> None:
    """A table of each limit, its value, and what is answered beyond it."""
    from ..http.limits import list_limits

    rows = [(row.name, f"{row.value:.12g}", row.meaning, row.answer) for row in list_limits(limits)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for name, value, meaning, answer in rows:
        print(f"{name:<{widths[0]}}  {value:>{widths[1]}}  {meaning:<{widths[2]}}  {answer}")


def make_server_options(options: argparse.Namespace, keys: Sequence[str], limits: Limits) -> ServerOptions:
    """Raises ConfigError for a value that cannot be."""
    from ..http.connections.auth import hash_key
    from ..http.options import ServerOptions

    if options.otlp_traces_endpoint is not None:
        from ..http.observe.tracing import check_endpoint

        check_endpoint(options.otlp_traces_endpoint)
    same = (name for name in ServerOptions.__struct_fields__ if hasattr(options, name))
    values = {name: getattr(options, name) for name in same} | {
        "api_key_hashes": tuple(hash_key(key) for key in keys),
        "server_id": secrets.token_hex(8),
        "drain_timeout_s": options.drain_timeout,
        "limits": limits,
        "root_path": read_root_path(options.root_path),
        "allowed_hosts": tuple(_read_matching("allowed_hosts", options.allowed_hosts)),
        "cors": _read_cors(options),
        "tls": _read_tls(options),
        "has_access_log": not options.disable_access_log,
        "unlogged_paths": tuple(filter(None, options.disable_access_log_for_endpoints.split(","))),
        "metrics_prefix": _check_prefix(options.metrics_prefix),
        "log_level": options.log_level.upper(),
    }
    try:
        return msgspec.convert(values, ServerOptions)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$.")
        raise ConfigError(path.rstrip("`"), getattr(options, path.rstrip("`"), None), what) from None


def read_root_path(path: str) -> str:
    """Without a '/' at its end."""
    root_path = path.rstrip("/")
    if root_path and not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", root_path):
        raise ConfigError("root_path", path, "a path such as /llm, of letters, digits, '.', '_', '~' and '-'")
    return root_path


def read_list(field: str, given: Sequence[str]) -> list[str]:
    """Texts, each as it is or, as vLLM takes them, several as a JSON list."""
    found: list[str] = []
    for text in given:
        try:
            found += msgspec.json.decode(text, type=list[str]) if text.startswith("[") else [text]
        except msgspec.MsgspecError as error:
            raise ConfigError(field, text, f"a text, or a JSON list of texts ({error})") from None
    if not all(found):
        raise ConfigError(field, "", "texts that are not empty")
    return found


def _read_matching(field: str, given: Sequence[str]) -> list[str]:
    """As `read_list`, of texts that can be in a request: another one would never let anybody in."""
    pattern, allowed = _FORMS[field]
    found = read_list(field, given)
    for text in found:
        if not re.fullmatch(pattern, text):
            raise ConfigError(field, text, allowed)
    return found


def _read_cors(options: argparse.Namespace) -> dict[str, Any] | None:
    names = ("origins", "methods", "headers")
    lists = {name: _read_matching(f"allowed_{name}", getattr(options, f"allowed_{name}")) for name in names}
    given = {name: texts for name, texts in lists.items() if texts}
    return given | {"allows_credentials": options.allow_credentials} if lists["origins"] else None


def _read_tls(options: argparse.Namespace) -> dict[str, Any] | None:
    names = ("certfile", "keyfile", "ca_certs", "cert_reqs")
    given = {name: getattr(options, f"ssl_{name}") for name in names if getattr(options, f"ssl_{name}")}
    if options.enable_ssl_refresh:
        given["refreshes"] = True
    if not given:
        return None
    if "certfile" not in given and given.keys() == {"refreshes"}:
        raise ConfigError("enable_ssl_refresh", True, "given with --ssl-certfile")
    if "certfile" not in given:
        raise ConfigError("ssl_certfile", None, f"a PEM file, beside ssl_{next(iter(given))}")
    import ssl

    from ..http.connections.tls import make_tls_context
    from ..http.options import TlsOptions

    if options.grpc_port is not None and options.ssl_cert_reqs == ssl.CERT_OPTIONAL:
        raise ConfigError("ssl_cert_reqs", 1, "0 or 2 with grpc_port: gRPC asks every client or none")
    make_tls_context(TlsOptions(**given))  # refused now rather than by each HTTP process
    return given


def collect_keys(options: argparse.Namespace) -> list[str]:
    """Keys of the options, the file and the environment, each once."""
    keys = [*options.api_key]
    if options.api_key_file is not None:
        keys += _read_key_file(Path(options.api_key_file))
    if os.environ.get(ENV_KEY):
        keys.append(os.environ[ENV_KEY])
    for key in keys:
        if not key.strip() or not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError("api_key", "***", "printable ASCII characters without spaces")
    return list(dict.fromkeys(keys))


def _read_key_file(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_KEY_FILE_BYTES + 1)
        lines = content.decode().splitlines()
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("api_key_file", str(path), f"a readable text file ({error})") from None
    if len(content) > _MAX_KEY_FILE_BYTES:
        raise ConfigError("api_key_file", str(path), f"a file of at most {_MAX_KEY_FILE_BYTES} bytes")
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        print(f"quire: {path} can be read by others; chmod 600 it", file=sys.stderr)
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise ConfigError("api_key_file", str(path), "a file with at least one key")
    return keys


def _refuse_fault_hooks(options: argparse.Namespace) -> None:
    """Nobody outside reaches an engine that breaks on purpose, whoever started it."""
    hooks = options.fault_hooks
    for name in options.attach or ():
        if is_tcp(name):
            continue  # it does not listen with fault hooks
        state = read_state(find_named(name))
        hooks = hooks or (state.fault_hooks if state is not None else "")
    if hooks:
        raise ConfigError("fault_hooks", hooks, f"none with --host {options.host}")


def check_exposure(options: argparse.Namespace, keys: list[str]) -> None:
    """Raise ConfigError for numbers out of range, and for an address that others reach without a key."""
    for name in ("port", "grpc_port"):
        if (port := getattr(options, name)) is not None and not 0 <= port <= 65535:
            raise ConfigError(name, port, "an integer from 0 to 65535")
    if options.max_waiting < 0:
        raise ConfigError("max_waiting", options.max_waiting, "an integer of at least 0")
    if not 0 <= options.drain_timeout <= 86400:
        raise ConfigError("drain_timeout", options.drain_timeout, "seconds from 0 to 86400")
    is_local = options.uds is not None or is_loopback(options.host)
    if not is_local:
        _refuse_fault_hooks(options)
    if keys or options.insecure_no_key or is_local:
        return
    raise ConfigError(
        "host",
        options.host,
        f"127.0.0.1 without an API key; give --api-key-file, --api-key or {ENV_KEY} "
        "(or --insecure-no-key, and anyone who reaches it gets in)",
    )
