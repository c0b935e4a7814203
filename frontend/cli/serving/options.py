"""The options of `quire serve`, and ServerOptions made of them. Starts and binds nothing."""

from __future__ import annotations

import argparse
import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ....ipc.daemon.daemon_state import read_state
from ....ipc.daemon.run_dir import find_named
from ....ipc.errors import ConfigError
from ....ipc.network.tcp_address import is_tcp
from ....ipc.processes.restarts import LOSS_WINDOW_S, MAX_LOSSES
from ...engine_args import SHARED_MAX_QUEUED_BYTES
from ...openai.connections.listen import is_loopback
from ..config_file import add_config_option
from ..engine_choice import add_engine_options
from ..parser import Parser

if TYPE_CHECKING:  # the server's modules load FastAPI, which --help does without
    from ...openai.limits import Limits
    from ...openai.options import ServerOptions

ENV_KEY = "QUIRE_API_KEY"
_EPILOG = """\
Without options: the model that ships with Quire, on http://127.0.0.1:8000. Another address than this
machine's own needs an API key. SIGTERM (or Ctrl-C) lets running requests finish; a second one does not.
"""


def make_parser() -> Parser:
    parser = Parser("quire serve", "Serve a model over HTTP, with OpenAI's API.", _EPILOG, " [MODEL]")
    text = "as --model; with --attach it is served as well"
    parser.add_argument("model_name", nargs="?", metavar="MODEL", help=text)
    group = parser.add_argument_group("server options")
    add = group.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    add("--port", type=int, default=8000, metavar="N", help="port (8000); 0: any free one")
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
    add("--otlp-traces-endpoint", metavar="URL", help="send a span a request to this OpenTelemetry collector")
    add_config_option(parser)
    add("--help-limits", action="store_true", help="show every limit and its value")
    add_engine_options(parser, takes_several=True)
    parser.set_defaults(scheduling_policy="fair", max_queued_bytes=SHARED_MAX_QUEUED_BYTES)
    return parser


def print_limits(limits: Limits) -> None:
    from ...openai.limits import list_limits

    rows = [(row.name, f"{row.value:.12g}", row.meaning, row.answer) for row in list_limits(limits)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for name, value, meaning, answer in rows:
        print(f"{name:<{widths[0]}}  {value:>{widths[1]}}  {meaning:<{widths[2]}}  {answer}")


def make_server_options(options: argparse.Namespace, keys: Sequence[str], limits: Limits) -> ServerOptions:
    """Raises ConfigError for a value that cannot be."""
    from ...openai.connections.auth import hash_key
    from ...openai.options import ServerOptions

    if options.otlp_traces_endpoint is not None:
        from ...openai.tracing import check_endpoint

        check_endpoint(options.otlp_traces_endpoint)
    values = {
        "host": options.host,
        "port": options.port,
        "api_key_hashes": tuple(hash_key(key) for key in keys),
        "max_waiting": options.max_waiting,
        "drain_timeout_s": options.drain_timeout,
        "max_http_restarts": options.max_http_restarts,
        "otlp_traces_endpoint": options.otlp_traces_endpoint,
        "stall_s": options.stall_s,
        "limits": limits,
    }
    try:
        return msgspec.convert(values, ServerOptions)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$.")
        raise ConfigError(path.rstrip("`"), getattr(options, path.rstrip("`"), None), what) from None


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
        lines = path.read_text(encoding="utf-8").splitlines()
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("api_key_file", str(path), f"a readable text file ({error})") from None
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
    if options.port < 0 or options.port > 65535:
        raise ConfigError("port", options.port, "an integer from 0 to 65535")
    if options.grpc_port is not None and not 0 <= options.grpc_port <= 65535:
        raise ConfigError("grpc_port", options.grpc_port, "an integer from 0 to 65535")
    if options.max_waiting < 0:
        raise ConfigError("max_waiting", options.max_waiting, "an integer of at least 0")
    if not 0 <= options.drain_timeout <= 86400:
        raise ConfigError("drain_timeout", options.drain_timeout, "seconds from 0 to 86400")
    if not is_loopback(options.host):
        _refuse_fault_hooks(options)
    if keys or options.insecure_no_key or is_loopback(options.host):
        return
    raise ConfigError(
        "host",
        options.host,
        f"127.0.0.1 without an API key; give --api-key-file, --api-key or {ENV_KEY} "
        "(or --insecure-no-key, and anyone who reaches it gets in)",
    )
