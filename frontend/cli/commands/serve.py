"""`quire serve`: binds the port, then starts the engine and the OpenAI-compatible server on it."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import os
import shlex
import socket
import stat
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ....ipc.daemon.daemon_state import SupervisorArgs, read_state
from ....ipc.daemon.run_dir import find_named
from ....ipc.errors import ConfigError
from ....ipc.network.tcp_address import is_tcp
from ....ipc.processes.process_limits import discard_unwritable
from ....ipc.processes.restarts import LOSS_WINDOW_S, MAX_LOSSES
from ...client.remote_daemon import Attachment, check_unattached
from ...daemon import DaemonStarter, check_name_is_free
from ...engine_args import SHARED_MAX_QUEUED_BYTES, EngineArgs
from ...openai.connections.listen import bind_socket, is_loopback, reserve_port
from ...openai.engines.daemon_model import load_daemon_models
from ..engine_choice import add_engine_options, read_engine_choice
from ..exit_codes import ExitCode
from ..parser import Parser

if TYPE_CHECKING:  # the server's modules load FastAPI, which --help does without
    from ...openai.limits import Limits
    from ...openai.options import ServerOptions

_MAX_PROCESSES = 64
_GRPC_SERVER = "...grpc.server"
_ENV_KEY = "QUIRE_API_KEY"
_EXAMPLES: tuple[tuple[str, str, dict[str, Any]], ...] = (  # a task, its route, what is asked
    ("generate", "/v1/chat/completions", {"messages": [{"role": "user", "content": "What is 12 plus 30?"}]}),
    ("embed", "/v1/embeddings", {"input": "A rose."}),
    ("score", "/rerank", {"query": "What is red?", "documents": ["A rose.", "A sum."]}),
    ("classify", "/classify", {"input": "A rose."}),
)
_EPILOG = """\
Without options: the model that ships with Quire, on http://127.0.0.1:8000. Another address than this
machine's own needs an API key. SIGTERM (or Ctrl-C) lets running requests finish; a second one does not.
"""


def run(argv: Sequence[str]) -> int:
    """Run `quire serve`."""
    options = _make_parser().parse(argv)
    from ...openai.limits import parse_limits

    limits = parse_limits(options.limit)
    if options.help_limits:
        _print_limits(limits)
        return ExitCode.OK
    keys = _collect_keys(options)
    _check_exposure(options, keys)
    server_options = _make_server_options(options, keys, limits)
    engine_args = _read_engine_args(options)
    with (
        bind_socket(options.host, options.port, options.share_port) as listening_socket,
        _reserve_grpc_port(options) as grpc_port,
    ):
        port = listening_socket.getsockname()[1]
        if grpc_port is not None:
            address = f"{_bracket(listening_socket.getsockname()[0])}:{grpc_port}"
            server_options = msgspec.structs.replace(server_options, grpc_address=address)
        box = functools.partial(format_box, options.host, port, has_keys=bool(keys), grpc_port=grpc_port)
        if engine_args is None:
            return _serve(options, server_options, listening_socket, options.attach, box)
        name = options.name or f"serve-{port}"
        config = engine_args.create_engine_config()
        check_name_is_free(name)
        starter = DaemonStarter(SupervisorArgs(name=name, config=config, ends_with_parent=True))
        try:
            starter.wait_until_attachable()
            daemons = [name, *(options.attach or ())]
            return _serve(options, server_options, listening_socket, daemons, box)
        finally:
            starter.stop()


def _print_limits(limits: Limits) -> None:
    from ...openai.limits import list_limits

    rows = [(row.name, f"{row.value:.12g}", row.meaning, row.answer) for row in list_limits(limits)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for name, value, meaning, answer in rows:
        print(f"{name:<{widths[0]}}  {value:>{widths[1]}}  {meaning:<{widths[2]}}  {answer}")


def _make_server_options(options: argparse.Namespace, keys: Sequence[str], limits: Limits) -> ServerOptions:
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


def _read_engine_args(options: argparse.Namespace) -> EngineArgs | None:
    """Arguments of the server's own engine; None with --attach alone, which serves daemons' engines only."""
    if options.model_name is not None:
        options.model = options.model_name
    attached = options.attach or ()
    # With a daemon of another machine MODEL names this machine's copy of its files.
    has_both = bool(attached) and options.model_name is not None and not any(map(is_tcp, attached))
    if attached and not has_both and options.name is not None:
        raise ConfigError("name", options.name, "not given with --attach: a daemon has a name")
    if not 1 <= options.api_server_count <= _MAX_PROCESSES:
        raise ConfigError(
            "api_server_count", options.api_server_count, f"an integer from 1 to {_MAX_PROCESSES}"
        )
    if has_both:
        check_unattached(keys=options.keys)
        return EngineArgs.from_cli_args(options)
    return read_engine_choice(options)


@contextlib.contextmanager
def _reserve_grpc_port(options: argparse.Namespace) -> Generator[int | None]:
    """The port of the gRPC API, kept for the block, in which HTTP processes listen on it; None without."""
    port = options.grpc_port
    if port is None:
        yield None
        return
    try:
        importlib.import_module(_GRPC_SERVER, __package__)
    except Exception as error:  # protobuf has an error of its own for code that is newer than it is
        raise ConfigError("grpc_port", port, f"only with: pip install 'quire[grpc]' ({error})") from None
    with reserve_port("grpc_port", options.host, port, options.share_port) as grpc_socket:
        yield grpc_socket.getsockname()[1]


def _serve(
    options: argparse.Namespace,
    server_options: ServerOptions,
    listening_socket: socket.socket,
    daemons: Sequence[Attachment],
    box: Callable[[Mapping[str, Sequence[str]], str], str],
) -> int:
    """Serve the engines of these daemons in this process, or in several, until a signal."""
    if options.api_server_count > 1:
        from ...openai.group import HttpGroup

        known = load_daemon_models(daemons, _show_phase)
        attach = known if len(known) > 1 else daemons[0]
        group = HttpGroup(attach, server_options, listening_socket, options.api_server_count)
        return group.run(lambda: _announce(box({one.model: one.tasks for one in known}, group.formats)))
    from ...async_llm import AsyncLLM
    from ...openai.engines.served_models import ServedModels
    from ...openai.options import HTTP_CLIENT_KIND
    from ...openai.server import run_server

    if len(daemons) > 1:
        engines = load_daemon_models(daemons, _show_phase)
    else:
        engines = AsyncLLM(attach=daemons[0], client_kind=HTTP_CLIENT_KIND)

    def announce(models: ServedModels) -> None:
        _announce(box({one.name: one.facts.tasks for one in models.models}, models.describe_formats()))

    return run_server(engines, server_options, listening_socket, announce, _show_phase)


def _bracket(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def format_box(
    host: str,
    port: int,
    models: Mapping[str, Sequence[str]],
    formats: str,
    has_keys: bool,
    grpc_port: int | None = None,
) -> str:
    """What to do with the server, as text to copy from.

    models: what each can do. formats: how tool calls and thoughts are read, '' without any to read.
    """
    shown = "127.0.0.1" if host in ("0.0.0.0", "::", "") else _bracket(host)
    url = f"http://{shown}:{port}"
    path, body = _make_example(models)
    auth = f' -H "Authorization: Bearer ${_ENV_KEY}"' if has_keys else ""
    curl = (
        f"curl {url}{path} -H 'Content-Type: application/json'{auth} "
        f"-d {shlex.quote(msgspec.json.encode(body).decode())}"
    )
    rows = [
        ("OpenAI API", f"{url}/v1"),
        ("model" if len(models) == 1 else "models", ", ".join(models)),
        ("docs", f"{url}/docs"),
        ("metrics", f"{url}/metrics"),
        ("page", f"{url}/"),
    ]
    if formats:
        rows.append(("formats", formats))
    if grpc_port is not None:
        rows.append(("gRPC", f"{shown}:{grpc_port}"))
    lines = [f"  {name:<11} {value}" for name, value in rows]
    return "\n".join(["Quire is ready", *lines, "", f"  {curl}", ""])


def _make_example(models: Mapping[str, Sequence[str]]) -> tuple[str, dict[str, Any]]:
    """Path and body of a request: to a model that generates, if there is one."""
    for task, path, fields in _EXAMPLES:
        for name, tasks in models.items():
            if task in tasks:
                return path, {"model": name} | fields
    return "/pooling", {"model": next(iter(models)), "input": "A rose."}


def _make_parser() -> Parser:
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
    add("--help-limits", action="store_true", help="show every limit and its value")
    add_engine_options(parser, takes_several=True)
    parser.set_defaults(scheduling_policy="fair", max_queued_bytes=SHARED_MAX_QUEUED_BYTES)
    return parser


def _collect_keys(options: argparse.Namespace) -> list[str]:
    """Keys of the options, the file and the environment, each once."""
    keys = [*options.api_key]
    if options.api_key_file is not None:
        keys += _read_key_file(Path(options.api_key_file))
    if os.environ.get(_ENV_KEY):
        keys.append(os.environ[_ENV_KEY])
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


def _check_exposure(options: argparse.Namespace, keys: list[str]) -> None:
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
        f"127.0.0.1 without an API key; give --api-key-file, --api-key or {_ENV_KEY} "
        "(or --insecure-no-key, and anyone who reaches it gets in)",
    )


def _show_phase(phase: str) -> None:
    with contextlib.suppress(OSError):  # as with the announcement
        print(f"quire: {phase} ...", file=sys.stderr, flush=True)


def _announce(text: str) -> None:
    """To who reads it: a server does not end because nobody does, or because a disk is full."""
    with contextlib.suppress(OSError):
        print(text)
    discard_unwritable(sys.stdout)
