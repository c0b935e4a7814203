"""The options of `quire serve`, and ServerOptions made of them. Starts and binds nothing."""

from __future__ import annotations

import argparse
import os
import re
import secrets
import stat
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ...ipc.daemon.daemon_state import read_state
from ...ipc.daemon.run_dir import find_named
from ...ipc.decoding import decode_json
from ...ipc.errors import ConfigError
from ...ipc.network.tcp_address import is_tcp
from ...ipc.spec.options import read_options
from ..http.connections.listen import is_loopback
from ..http.limits import Limits, list_limits
from ..http.options import CorsOptions, ServerOptions, TlsOptions
from ..options.engine_args import SHARED_MAX_QUEUED_BYTES, add_option
from .engine_choice import add_engine_options
from .parser import Parser, add_config_option

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
    groups = {name: parser.add_argument_group(f"{name} options") for name in ("server", "network", "log")}
    for option in read_options(ServerOptions):
        if option.text is not None:  # the others are made of what follows
            group, default = groups[option.get("group", "server")], option.default
            text = option.text if default in (None, "", False) else f"{option.text} (%(default)s)"
            add_option(group, option.name, option.type.__name__, default, text, option.choices)
    add = groups["server"].add_argument
    add("--api-key", action="append", default=[], metavar="KEY", help="a key to let in (repeatable)")
    add("--api-key-file", metavar="FILE", help="keys to let in, one a line")
    add("--grpc-port", type=int, metavar="N", help="port of the gRPC API (none); 0: any free one")
    add("--insecure-no-key", action="store_true", help="allow another address without a key: anyone gets in")
    add("--limit", action="append", default=[], metavar="NAME=VALUE", help="set a limit (repeatable)")
    add("--help-limits", action="store_true", help="show every limit and its value")
    add("--api-server-count", type=int, default=1, metavar="N", help="HTTP processes on the port (1)")
    text = "as vLLM's, without an effect: tools that a request offers may always be called"
    add("--enable-auto-tool-choice", action="store_true", help=text)
    add("--share-port", action="store_true", help="join servers of yours that listen on the port already")
    add("--name", help="what `quire ps` and --attach call the engine (serve-PORT)")
    _add_network_options(groups["network"].add_argument)
    _add_log_options(groups["log"].add_argument)
    add_config_option(parser)
    add_engine_options(parser, takes_several=True)
    parser.set_defaults(scheduling_policy="fair", max_queued_bytes=SHARED_MAX_QUEUED_BYTES)
    return parser


def _add_network_options(add: Callable[..., object]) -> None:
    """What stands between clients and the server: TLS, a proxy, browsers. Names and meaning are vLLM's."""
    add("--ssl-certfile", metavar="FILE", help="serve HTTPS, and gRPC over TLS, with this certificate (PEM)")
    add("--ssl-keyfile", metavar="FILE", help="its key, without a password; default: in the same file")
    add("--ssl-ca-certs", metavar="FILE", help="whose certificates clients may have")
    text = "certificates of clients: 0 not asked for, 1 checked, 2 needed (0)"
    add("--ssl-cert-reqs", type=int, default=0, metavar="N", help=text)
    text = "read these files again when they have changed, for new connections"
    add("--enable-ssl-refresh", action="store_true", help=text)
    text = "a name that requests may be for, '*.example.com' too; default: any with an API key"
    add("--allowed-hosts", action="append", default=[], metavar="NAME", help=text)
    text = "where browsers' pages may come from, '*': anywhere (nowhere); as vLLM's it may be a JSON list"
    add("--allowed-origins", action="append", default=[], metavar="ORIGIN", help=text)
    add("--allow-credentials", action="store_true", help="browsers may send cookies along")
    text = "methods of such pages ('*')"
    add("--allowed-methods", action="append", default=[], metavar="METHOD", help=text)
    add("--allowed-headers", action="append", default=[], metavar="NAME", help="headers of such pages ('*')")


def _add_log_options(add: Callable[..., object]) -> None:
    text = "no line for each request (they are there down to --log-level INFO; refusals to WARNING)"
    add("--disable-access-log", "--disable-uvicorn-access-log", action="store_true", help=text)
    text = "no line for successes of these paths, as /health,/metrics"
    add("--disable-access-log-for-endpoints", default="", metavar="PATHS", help=text)


def _check_prefix(prefix: str) -> str:
    if not re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", prefix):
        raise ConfigError("metrics_prefix", prefix, "letters, digits, '_' and ':', as in 'vllm:'")
    return prefix


def print_limits(limits: Limits) -> None:
    """A table of each limit, its value, and what is answered beyond it."""
    rows = [(row.name, f"{row.value:.12g}", row.meaning, row.answer) for row in list_limits(limits)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for name, value, meaning, answer in rows:
        print(f"{name:<{widths[0]}}  {value:>{widths[1]}}  {meaning:<{widths[2]}}  {answer}")


def make_server_options(options: argparse.Namespace, keys: Sequence[str], limits: Limits) -> ServerOptions:
    """Raises ConfigError for a value that cannot be."""
    from ..http.connections.auth import hash_key

    if options.otlp_traces_endpoint is not None:
        from ..http.observe.tracing import check_endpoint

        check_endpoint(options.otlp_traces_endpoint)
    values: dict[str, Any] = {
        option.field: getattr(options, option.name) for option in read_options(ServerOptions)
    }
    values |= {
        "api_key_hashes": tuple(hash_key(key) for key in keys),
        "server_id": secrets.token_hex(8),
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
    return ServerOptions(**values)


def read_root_path(path: str) -> str:
    """Without a '/' at its end."""
    root_path = path.rstrip("/")
    if root_path and not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", root_path):
        raise ConfigError("root_path", path, "a path such as /llm, of letters, digits, '.', '_', '~' and '-'")
    return root_path


def read_list(field: str, texts: Sequence[str]) -> list[str]:
    """Texts, each as it is or, as vLLM takes them, several as a JSON list."""
    values: list[str] = []
    for text in texts:
        try:
            values += decode_json(text, list[str]) if text.startswith("[") else [text]
        except msgspec.MsgspecError as error:
            raise ConfigError(field, text, f"a text, or a JSON list of texts ({error})") from None
    if not all(values):
        raise ConfigError(field, "", "texts that are not empty")
    return values


def _read_matching(field: str, texts: Sequence[str]) -> list[str]:
    """As `read_list`, of texts that can be in a request: another one would never let anybody in."""
    pattern, allowed = _FORMS[field]
    values = read_list(field, texts)
    for text in values:
        if not re.fullmatch(pattern, text):
            raise ConfigError(field, text, allowed)
    return values


def _read_cors(options: argparse.Namespace) -> CorsOptions | None:
    names = ("origins", "methods", "headers")
    lists = {name: _read_matching(f"allowed_{name}", getattr(options, f"allowed_{name}")) for name in names}
    filled = {name: tuple(texts) for name, texts in lists.items() if texts}
    return CorsOptions(**filled, allows_credentials=options.allow_credentials) if lists["origins"] else None


def _read_tls(options: argparse.Namespace) -> TlsOptions | None:
    names = ("certfile", "keyfile", "ca_certs", "cert_reqs")
    files = {name: getattr(options, f"ssl_{name}") for name in names if getattr(options, f"ssl_{name}")}
    if options.enable_ssl_refresh:
        files["refreshes"] = True
    if not files:
        return None
    if "certfile" not in files and files.keys() == {"refreshes"}:
        raise ConfigError("enable_ssl_refresh", True, "only with --ssl-certfile")
    if "certfile" not in files:
        raise ConfigError("ssl_certfile", None, f"a PEM file, beside ssl_{next(iter(files))}")
    import ssl

    from ..http.connections.tls import make_tls_context

    if options.grpc_port is not None and options.ssl_cert_reqs == ssl.CERT_OPTIONAL:
        raise ConfigError("ssl_cert_reqs", 1, "0 or 2 with grpc_port: gRPC asks every client or none")
    tls = TlsOptions(**files)
    make_tls_context(tls)  # refused now rather than by each HTTP process
    return tls


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
    """Raise ConfigError for an address that others reach without a key."""
    if options.grpc_port is not None and not 0 <= options.grpc_port <= 65535:
        raise ConfigError("grpc_port", options.grpc_port, "an integer from 0 to 65535")
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
