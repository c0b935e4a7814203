"""run_server: one HTTP process from its socket to its exit code. Knows neither who made the engine's client
nor who bound the socket, so that one process, one attached to a daemon and one of many are run alike.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import resource
import signal
import socket
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING

import msgspec

from ...ipc.errors import EngineDeadError
from ...ipc.processes.heap import limit_kept_heap
from ...ipc.processes.log_lines import start_logging
from ...ipc.processes.process_limits import raise_file_limit
from ..async_llm import AsyncLLM
from ..client.engine_connection import PhaseCallback
from ..text.tokenizer import encode_without_threads
from .app import create_app
from .connections.admission import Admission
from .connections.auth import ApiKeys
from .connections.connection import Connection
from .connections.hosts import find_allowed_hosts
from .connections.layers import wrap_routes
from .connections.listener import Listener
from .engines.attachments import Attachments, OnlyEngine
from .engines.daemon_model import DaemonModel
from .engines.served_models import ServedModels
from .engines.server_parts import ServerParts
from .jobs.peers import PeerSockets
from .observe.access_log import PROCESS, make_access_log, note_output, note_pooled
from .observe.tracing import Tracing
from .options import ServerOptions, find_max_grpc_connections
from .stream import cancel_and_wait

if TYPE_CHECKING:  # what a server without a gRPC port does not load
    from ..grpc.server import GrpcServer

_ABORT_GRACE_S = 2.0  # for the last chunks of aborted requests
_TELL_S = 5.0  # between two lines on what a drain waits for
_FLUSH_GRACE_S = 1.0  # for the last bytes on their way to slow readers
_FLUSH_POLL_S = 0.01
_OTHER_FILES = 192  # descriptors beside connections: files, pipes, and refused clients that still read why
# As much garbage as by default may wait, and it is looked for a seventh as often: most requests have been
# answered by then.
_GC_THRESHOLDS = 5000, 5, 5
_logger = logging.getLogger("quire.serve")

ReadyCallback = Callable[[ServedModels], None]
Engines = AsyncLLM | tuple[DaemonModel, ...]  # one engine, or several daemons'


def run_server(
    engines: Engines,
    options: ServerOptions,
    listening_socket: socket.socket,
    on_ready: ReadyCallback | None = None,
    on_phase: PhaseCallback | None = None,
    on_loop: Callable[[], None] | None = None,
    peers: PeerSockets | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT, then drain; returns the exit code 0.

    Starts the engine if it is not (meanwhile /live answers and /ready says 503) and shuts it down at the end.
    `on_loop` is called in the event loop before that. `peers`: of a group, for responses of the others.
    Raises EngineStartError when it does not start, EngineDeadError when it ends while the server runs; of
    several daemons each may be away, now and later.
    """
    import uvloop

    limit_kept_heap()
    encode_without_threads()  # many texts go to a text process
    start_logging(PROCESS, options.log_level, options.log_format, "WARNING")
    options = fit_connections(options, raise_file_limit())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if on_loop is not None:
            runner.get_loop().call_soon(on_loop)
        server = Server(engines, options, peers)
        return runner.run(server.serve(listening_socket, on_ready, on_phase))


class Server:
    """The life of one server: load, serve, drain, end."""

    def __init__(self, engines: Engines, options: ServerOptions, peers: PeerSockets | None = None) -> None:
        self._peers = peers
        self._options = options
        if isinstance(engines, tuple):
            parts = ServerParts(options)
            self._engines = Attachments(engines, parts)
            self._models = ServedModels(parts, self._engines.models)
        else:
            self._models = ServedModels.of_one(engines, options)
            self._engines = OnlyEngine(self._models.only)
        self.connections: set[Connection] = set()
        self._tasks = self._models.parts.tasks
        self._stop = asyncio.Event()  # a first signal, or a dead engine
        self._stop_now = asyncio.Event()  # a second signal
        endpoint = options.otlp_traces_endpoint
        self._tracing = None if endpoint is None else Tracing(endpoint)
        self._access_log = make_access_log(options)
        if self._access_log is not None:
            self._models.parts.on_output.append(note_output)
            self._models.parts.on_pooled.append(note_pooled)
        self._grpc: GrpcServer | None = None
        self._has_died = False  # the engine, while the server ran

    async def serve(
        self,
        listening_socket: socket.socket,
        on_ready: ReadyCallback | None = None,
        on_phase: PhaseCallback | None = None,
    ) -> int:
        """See run_server."""
        loop = asyncio.get_running_loop()
        if self._access_log is not None:
            self._access_log.start()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        if self._options.grpc_address is not None:
            from ..grpc.server import GrpcServer

            address, tasks = self._options.grpc_address, self._tasks
            self._grpc = GrpcServer(self._models, address, tasks, self._access_log)
        listen = functools.partial(self._listen, listening_socket, self._make_factory())
        listener = None if self._options.accepts_when_ready else await listen()
        try:
            if await self._run_until_signal(self._engines.start(on_phase)):
                listener = listener or await listen()
                gc.freeze()  # what start-up made lives for ever; the collector need not walk it
                gc.set_threshold(*_GC_THRESHOLDS)
                if on_ready is not None:
                    on_ready(self._models)
                self._has_died = await self._run_until_signal(self._engines.wait_until_dead())
            await self._drain()
        finally:
            if listener is not None:
                listener.close()
            self._engines.shutdown()
            self._models.close()
            if self._grpc is not None:
                await self._grpc.close()
            for connection in list(self.connections):
                connection.close_now()
            if self._tracing is not None:
                await asyncio.to_thread(self._tracing.close)
            if self._access_log is not None:
                await asyncio.to_thread(self._access_log.close)
        if self._has_died:
            raise EngineDeadError(f"the engine has ended: {self._engines.dead_error}")
        return 0

    async def _listen(self, listening_socket: socket.socket, factory: Callable[[], Connection]) -> Listener:
        if self._grpc is not None:
            await self._grpc.start()
        if self._peers is not None:
            await self._models.parts.responses.join(self._peers)
        if self._options.tls is not None:
            from .connections.tls import TlsListener

            return TlsListener(
                listening_socket, factory, self._options.tls, self._options.limits.max_header_s
            )
        return Listener(listening_socket, factory)

    def _make_factory(self) -> Callable[[], Connection]:
        options = self._options
        routes = create_app(self._models, self._peers)
        app = wrap_routes(routes, options)
        if self._tracing is not None:
            app = self._tracing.wrap(app, self._models.parts)
        admission = Admission(
            options.limits,
            ApiKeys(options.api_key_hashes, options.server_id),
            routes.body_paths,
            self.connections,
            self._models.parts.run,
            options.root_path,
            find_allowed_hosts(options),
            self._access_log,
        )
        return lambda: Connection(app, admission)

    async def _run_until_signal(self, work: Coroutine[None, None, None]) -> bool:
        """True when `work` has ended, whose error is raised; False, and it is cancelled, at a signal."""
        working = asyncio.ensure_future(work)
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                return False
            working.result()
            return True
        finally:
            await cancel_and_wait(working, stopping)

    async def _drain(self) -> None:
        """New requests get 503; running ones may end, then are aborted, then are cut off."""
        self._models.parts.drain()
        if self._grpc is not None:
            self._grpc.drain(self._options.drain_timeout_s + _ABORT_GRACE_S)
        for connection in list(self.connections):
            connection.shutdown()
        if not await self._wait_until_idle(self._options.drain_timeout_s):
            _logger.warning("%d requests have not ended, and are aborted", len(self._tasks))
            self._models.close()  # what has not been rendered by now is not going to be answered
            for serving in self._models.servings:
                ids = serving.capacity.request_ids
                if ids and serving.llm.is_running:
                    await serving.llm.abort(ids)
            await self._wait_until_idle(_ABORT_GRACE_S, is_told=False)
        await self._close_connections()

    async def _close_connections(self) -> None:
        """Let what has been answered reach its reader; cut off what still runs."""
        for connection in list(self.connections):
            if connection.exchange is not None:
                connection.close_now()
            else:
                connection.transport.close()
        deadline = asyncio.get_running_loop().time() + _FLUSH_GRACE_S
        while (self.connections or self._tasks) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(_FLUSH_POLL_S)

    async def _wait_until_idle(self, timeout_s: float, is_told: bool = True) -> bool:
        """True when no request is under way any more; False after `timeout_s` or a second signal.

        is_told: the log says what is waited for.
        """
        hurry = asyncio.ensure_future(self._stop_now.wait())
        now = asyncio.get_running_loop().time
        deadline = tell_at = now() + timeout_s
        if is_told:
            tell_at = now()
        try:
            while self._tasks:
                left_s = deadline - now()
                if left_s <= 0 or hurry.done():
                    return False
                if now() >= tell_at:
                    tell_at = now() + _TELL_S
                    self._tell_what_runs(left_s)
                waited: set[asyncio.Future[object]] = {hurry, *self._tasks}  # pyright: ignore[reportAssignmentType]
                wait_s = min(left_s, max(tell_at - now(), 0.0))
                await asyncio.wait(waited, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            return True
        finally:
            hurry.cancel()

    def _tell_what_runs(self, left_s: float) -> None:
        sequences = [
            f"{serving.capacity.num_sequences} sequences of {serving.model_id!r}"
            for serving in self._models.servings
        ]
        _logger.info(
            "ending: %d requests are under way (%s) and have %.0f s; another signal aborts them",
            *(len(self._tasks), ", ".join(sequences), left_s),
        )

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._stop_now.set()
        self._stop.set()


def fit_connections(options: ServerOptions, max_open_files: int) -> ServerOptions:
    """Fewer connections where there are not descriptors for all: one without gets no answer, not even 503."""
    has_grpc = options.grpc_address is not None
    num_others = _OTHER_FILES + has_grpc * find_max_grpc_connections(max_open_files)
    most = max(max_open_files // 2, max_open_files - num_others)
    limits = options.limits
    if max_open_files == resource.RLIM_INFINITY or limits.max_connections <= most:
        return options
    because = f"this process may have {max_open_files} files open (ulimit -n)"
    _logger.warning("max_connections=%d becomes %d: %s", limits.max_connections, most, because)
    return msgspec.structs.replace(options, limits=msgspec.structs.replace(limits, max_connections=most))
