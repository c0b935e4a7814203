"""`quire serve`: binds the port, then starts the engine and the OpenAI-compatible server on it.

When that is ready it prints where its API is, and a request to copy.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import re
import shlex
import socket
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ....ipc.daemon.daemon_state import SupervisorArgs
from ....ipc.errors import ConfigError, describe_install
from ....ipc.network.tcp_address import is_tcp
from ....ipc.processes.collector import paused_collector
from ....ipc.processes.process_limits import discard_unwritable
from ...client.remote_daemon import Attachment, check_unattached
from ...daemon import DaemonStarter, check_name_is_free
from ...http.connections.listen import bind_socket, listen_at_path, reserve_port
from ...http.engines.daemon_model import DaemonModel, load_daemon_model, load_daemon_models
from ...options.engine_args import EngineArgs
from .. import serve_options
from ..engine_choice import check_names_end, choose_model, read_engine_choice
from ..parser import ExitCode
from ..streams import PhaseLine

if TYPE_CHECKING:  # the server's modules load Starlette, which --help does without
    from ...http.options import ServerOptions

_MAX_PROCESSES = 64
_GRPC_SERVER = "...grpc.server"
_MAX_NAME_REST = 26  # letters behind 'serve-'
_EXAMPLES: tuple[tuple[str, str, dict[str, Any]], ...] = (  # a task, its route, what is asked
    ("generate", "/v1/chat/completions", {"messages": [{"role": "user", "content": "What is 12 plus 30?"}]}),
    ("embed", "/v1/embeddings", {"input": "A rose."}),
    ("score", "/rerank", {"query": "What is red?", "documents": ["A rose.", "A sum."]}),
    ("classify", "/classify", {"input": "A rose."}),
)


def run(argv: Sequence[str]) -> int:
    """Run `quire serve`."""
    options = serve_options.make_parser().parse(argv)
    options.model = choose_model(argv, options.model_name, options.model)
    check_names_end(argv, options.served_model_name, options.model_name)
    from ...http.limits import parse_limits

    limits = parse_limits(options.limit)
    if options.help_limits:
        serve_options.print_limits(limits)
        return ExitCode.OK
    keys = serve_options.collect_keys(options)
    serve_options.check_exposure(options, keys)
    server_options = serve_options.make_server_options(options, keys, limits)
    engine_args = _read_engine_args(options)
    with _listen(options) as listening_socket, _reserve_grpc_port(options) as grpc_address:
        place = _name_place(options, listening_socket)
        server_options = msgspec.structs.replace(server_options, grpc_address=grpc_address)
        box = functools.partial(format_box, place, has_keys=bool(keys), grpc_address=grpc_address)
        if engine_args is None:
            return _serve(options, server_options, listening_socket, options.attach, box)
        name = options.name or place.engine_name
        config = engine_args.create_engine_config()
        check_name_is_free(name)
        starter = DaemonStarter(SupervisorArgs(name=name, config=config, ends_with_parent=True))
        try:
            starter.wait_until_attachable()
            daemons = [name, *(options.attach or ())]
            return _serve(options, server_options, listening_socket, daemons, box)
        finally:
            starter.stop()


def _listen(options: argparse.Namespace) -> contextlib.AbstractContextManager[socket.socket]:
    if options.uds is not None:
        return listen_at_path(options.uds)
    return bind_socket(options.host, options.port, options.share_port)


def _name_place(options: argparse.Namespace, listening_socket: socket.socket) -> Place:
    port = 0 if options.uds is not None else listening_socket.getsockname()[1]
    return Place(options.host, port, options.uds, has_tls=options.ssl_certfile is not None)


def _read_engine_args(options: argparse.Namespace) -> EngineArgs | None:
    """Arguments of the server's own engine; None with --attach alone, which serves daemons' engines only."""
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
def _reserve_grpc_port(options: argparse.Namespace) -> Generator[str | None]:
    """'HOST:PORT' of the gRPC API, kept for the block, in which HTTP processes listen on it; None without."""
    port = options.grpc_port
    if port is None:
        yield None
        return
    try:
        importlib.import_module(_GRPC_SERVER, __package__)
    except Exception as error:  # protobuf has an error of its own for code that is newer than it is
        raise ConfigError("grpc_port", port, f"only with: {describe_install('grpc')} ({error})") from None
    with reserve_port("grpc_port", options.host, port, options.share_port) as grpc_socket:
        host, port = grpc_socket.getsockname()[:2]
        yield f"{bracket(host)}:{port}"


def _serve(
    options: argparse.Namespace,
    server_options: ServerOptions,
    listening_socket: socket.socket,
    daemons: Sequence[Attachment],
    box: Callable[[Mapping[str, Sequence[str]], str], str],
) -> int:
    """Serve the engines of these daemons in this process, or in several, until a signal."""
    prints_lines = server_options.log_format == "text"
    line = PhaseLine(f"serve {server_options.uds or server_options.port}", prints_lines)
    if options.api_server_count > 1:
        code = _serve_by_group(options, server_options, listening_socket, daemons, box, line)
        line.end()
        return code
    with paused_collector():  # Starlette's modules
        from ...async_llm import AsyncLLM
        from ...http.engines.served_models import ServedModels
        from ...http.options import HTTP_CLIENT_KIND
        from ...http.server import run_server

    if len(daemons) > 1:
        engines = _load_models(options, daemons, line)
    else:
        engines = AsyncLLM(attach=daemons[0], client_kind=HTTP_CLIENT_KIND)

    def announce(models: ServedModels) -> None:
        line.clear()
        _announce(box({model.name: model.facts.tasks for model in models.models}, models.describe_formats()))

    code = run_server(engines, server_options, listening_socket, announce, line.show)
    line.end()
    return code


def _load_models(
    options: argparse.Namespace, daemons: Sequence[Attachment], line: PhaseLine
) -> tuple[DaemonModel, ...]:
    """What several daemons serve. Its own engine is waited for: without that the server would end."""
    if daemons[0] not in options.attach:
        load_daemon_model(daemons[0], line.show)
    return load_daemon_models(daemons, line.show)


def _serve_by_group(
    options: argparse.Namespace,
    server_options: ServerOptions,
    listening_socket: socket.socket,
    daemons: Sequence[Attachment],
    box: Callable[[Mapping[str, Sequence[str]], str], str],
    line: PhaseLine,
) -> int:
    from ...http.group import HttpGroup

    # Processes over several daemons must know before they begin which models there are.
    attach = daemons[0] if len(daemons) == 1 else _load_models(options, daemons, line)

    def announce() -> None:
        line.clear()
        known = load_daemon_models(daemons)
        _announce(box({model.served_model_name: model.tasks for model in known}, group.formats))

    num_processes = options.api_server_count
    group = HttpGroup(attach, server_options, listening_socket, num_processes, line.show)
    return group.run(announce)


def _announce(text: str) -> None:
    """To who reads it: a server does not end because nobody does, or because a disk is full."""
    with contextlib.suppress(OSError):
        print(text)
    discard_unwritable(sys.stdout)


def bracket(host: str) -> str:
    """A host as URLs have it: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server listens: at a port, or at the Unix socket `uds`."""

    host: str
    port: int
    uds: str | None = None
    has_tls: bool = False

    @property
    def shown_host(self) -> str:
        """An address that reaches it from this machine."""
        return "127.0.0.1" if self.host in ("0.0.0.0", "::", "") else bracket(self.host)

    @property
    def url(self) -> str:
        """Of its root."""
        scheme = "https" if self.has_tls else "http"
        return f"{scheme}://localhost" if self.uds else f"{scheme}://{self.shown_host}:{self.port}"

    @property
    def engine_name(self) -> str:
        """What its engine is called, if nobody says otherwise."""
        rest = str(self.port) if self.uds is None else re.sub(r"[^A-Za-z0-9_-]", "-", Path(self.uds).stem)
        return f"serve-{rest[:_MAX_NAME_REST]}"


def format_box(
    place: Place,
    models: Mapping[str, Sequence[str]],
    formats: str,
    has_keys: bool,
    grpc_address: str | None = None,
) -> str:
    """What to do with the server, as text to copy from.

    models: what each can do. formats: how tool calls and thoughts are read, '' without any to read.
    """
    url = place.url
    path, body = _make_example(models)
    auth = f' -H "Authorization: Bearer ${serve_options.ENV_KEY}"' if has_keys else ""
    curl = (
        f"curl {_name_socket(place)}{url}{path} -H 'Content-Type: application/json'{auth} "
        f"-d {shlex.quote(msgspec.json.encode(body).decode())}"
    )
    rows = [
        ("OpenAI API", f"{url}/v1"),
        ("model" if len(models) == 1 else "models", ", ".join(models)),
        ("docs", f"{url}/docs"),
        ("metrics", f"{url}/metrics"),
        ("page", f"{url}/"),
    ]
    if place.uds is not None:
        rows.append(("socket", place.uds))
    if formats:
        rows.append(("formats", formats))
    if grpc_address is not None:
        address = f"{place.shown_host}:{grpc_address.rpartition(':')[2]}"
        rows.append(("gRPC", f"{address} (TLS)" if place.has_tls else address))
    lines = [f"  {name:<11} {value}" for name, value in rows]
    return "\n".join(["Quire is ready", *lines, "", f"  {curl}", ""])


def _name_socket(place: Place) -> str:
    return "" if place.uds is None else f"--unix-socket {shlex.quote(place.uds)} "


def _make_example(models: Mapping[str, Sequence[str]]) -> tuple[str, dict[str, Any]]:
    """Path and body of a request: to a model that generates, if there is one."""
    for task, path, fields in _EXAMPLES:
        for name, tasks in models.items():
            if task in tasks:
                return path, {"model": name} | fields
    return "/pooling", {"model": next(iter(models)), "input": "A rose."}
