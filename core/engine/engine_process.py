"""The engine core's process: EngineLoop with a ROUTER for its clients, beside its owner's lifeline.

One thread, and the listener's. Between turns it blocks in poll until a client, the worker or the owner has
something to say, or the loop something to do; it never spins and never waits for one client.
"""

from __future__ import annotations

import gc
import logging
import secrets
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NoReturn

import msgspec
import zmq

from ...ipc.decoding import decode_msgpack
from ...ipc.errors import ModelError
from ...ipc.files.private_cache import LISTING_NAME, keep_entry
from ...ipc.processes.child_args import CoreArgs
from ...ipc.processes.due import find_earliest, until_ms
from ...ipc.processes.fault_hooks import make_fault_hooks
from ...ipc.processes.log_lines import start_logging
from ...ipc.processes.process import (
    EXIT_CRASHED,
    EXIT_OK,
    EXIT_START_FAILED,
    EXIT_WORKER_LOST,
    Lifeline,
    catch_signals,
    enable_stack_dumps,
)
from ...ipc.processes.process_limits import raise_file_limit
from ...ipc.protocol.messages import EngineCoreOutputs, EngineDead
from ...ipc.protocol.request_price import find_max_frame_bytes
from ...ipc.protocol.sockets import bind_router
from ..clients.client_registry import ClientRegistry, GroupRoster
from ..clients.listener import ClientListener, Listener
from ..clients.origin import is_remote
from ..stats.engine_facts import StartupClock
from ..workers.executor import make_executor
from .engine_loop import EngineEnd, EngineLoop
from .file_digests import start_digests

_log = logging.getLogger(__name__)

FIRST_HELLO_TIMEOUT_S = 2.0  # how long a failed start waits for its owner, to tell it why
GOODBYE_TIMEOUT_S = 0.5
STOP_GRACE_S = 0.5  # for the worker to leave by itself
PARENT_LOST_GRACE_S = 1.2  # then the lifeline's thread ends this process
SWITCH_INTERVAL_S = 0.0005  # how long the listener's thread waits for the main thread; the others sleep


class EngineCoreProcess:
    """Serves clients until the lifeline closes or the engine ends."""

    def __init__(self, args: CoreArgs, lifeline_fd: int, started_at: float) -> None:
        config = args.config
        for folder in {config.model.model, config.model.tokenizer}:
            if config.model.gguf_tensors or Path(folder, LISTING_NAME).exists():
                keep_entry(folder)  # of a cache; later clients and workers read it
        self._model = config.model
        self._faults = make_fault_hooks(config.fault_hooks, "core")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        if self._faults is not None:
            self._faults.reach("core.bind")
        max_frame_bytes = find_max_frame_bytes(config.model.max_model_len)
        router = bind_router(self._context, args.client_address, max_frame_bytes=max_frame_bytes)
        self._listener = Listener(router, args.client_address)
        self._listeners: list[ClientListener] = [self._listener]
        self._executor = make_executor(config, self._context, args.worker_address)
        group = GroupRoster(args.engine_index, args.roster, args.owner_identity)
        self._registry = ClientRegistry(secrets.token_hex(8), started_at, self._send, group=group)
        self._network = self._remote_clients = None
        if args.network is not None:
            from ..network.remote_clients import open_network  # with what only it needs

            opened = open_network(args.network, args.journal_path, max_frame_bytes)
            self._network, self._remote_clients = opened
            self._registry.find_remote_origin = self._remote_clients.find_origin
            self._listeners.append(self._network)
        startup = StartupClock("start core", started_at)
        self._loop = EngineLoop(config, self._executor, self._registry, startup, args.journal_path)
        self._lifeline_fd = lifeline_fd
        self._signals = catch_signals(signal.SIGTERM)
        self._poller = zmq.Poller()
        self._client_poller = zmq.Poller()
        for listener in self._listeners:
            self._poller.register(listener.router, zmq.POLLIN)
            self._poller.register(listener.lost_fd, zmq.POLLIN)
            self._client_poller.register(listener.router, zmq.POLLIN)
        for fd in (lifeline_fd, self._signals.fileno()):
            self._poller.register(fd, zmq.POLLIN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the user's program's business

    def run(self) -> int:
        """Serve; returns the exit code. Every way out ends the worker and tells the clients."""
        try:
            end = self._serve()
            self._tell_clients(end)
            exit_code = end.exit_code
            if exit_code == EXIT_OK and self._remote_clients is not None:
                self._remote_clients.memory.close()
        except Exception:
            _log.error("engine core failed\n%s", traceback.format_exc())
            exit_code = EXIT_CRASHED
        self._executor.stop(STOP_GRACE_S)
        for listener in self._listeners:
            listener.stop()
        self._context.destroy(linger=200)
        return exit_code

    def _serve(self) -> EngineEnd:
        self._start()
        while self._loop.end is None and self._registry.core is None:
            self._turn()
        gc.freeze()  # the collector need not walk what start-up made, which stays
        if self._loop.end is None:
            start_digests(self._model)
        while self._loop.end is None:
            self._turn()
        return self._loop.end

    def _start(self) -> None:
        if self._remote_clients is not None:
            try:
                self._remote_clients.note_files(self._model)
            except ModelError as error:
                self._loop.finish(EXIT_START_FAILED, str(error), type(error).__name__)
                return
        self._executor.register(self._poller)
        self._loop.start()

    def _turn(self) -> None:
        ready = self._wait()
        if self._lifeline_fd in ready or self._signals.fileno() in ready:
            self._loop.finish(EXIT_OK, "the engine was stopped")
            return
        if any(listener.lost_fd in ready and listener.has_lost_one() for listener in self._listeners):
            self._registry.leases.note_disconnect()
        self._listener.restore(time.monotonic())
        readable = [listener for listener in self._listeners if listener.router in ready]
        self._loop.run_turn(_receive(readable))

    def _wait(self) -> dict[object, int]:
        """Until something arrives or the loop has something to do."""
        next_turn_at = self._loop.next_turn_at
        if self._network is not None:
            next_turn_at = find_earliest(next_turn_at, self._network.register(self._poller))
        timeout_ms = None if next_turn_at is None else until_ms(next_turn_at)
        core = self._registry.core
        if core is None or not core.num_in_flight:
            return dict(self._poller.poll(timeout_ms))
        if not self._executor.pids:  # in-process: `receive` computes the step
            return dict(self._poller.poll(0))
        waited_from = time.perf_counter()
        ready = dict(self._poller.poll(timeout_ms))
        core.counters.step_wait_s += time.perf_counter() - waited_from
        return ready

    # Clients.

    def _send(self, identity: bytes, message: msgspec.Struct) -> bool:
        """True if queued, False if this client's queue is full. Raises ConnectionResetError if it is gone."""
        try:
            frames = self._loop.codec.encode(message)
            if self._faults is not None and isinstance(message, EngineCoreOutputs):
                frames = self._faults.corrupt("core.outputs_frame", frames)
            self._listeners[is_remote(identity)].send(identity, frames)  # who is remote came by the second
            return True
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise ConnectionResetError from None
            raise

    def _tell_clients(self, end: EngineEnd) -> None:
        """Tell clients of an end that is final. After any other, the next core serves them."""
        if end.exit_code == EXIT_START_FAILED:
            deadline = time.monotonic() + FIRST_HELLO_TIMEOUT_S
            while not self._registry.has_owner and (left_s := deadline - time.monotonic()) > 0:
                self._client_poller.poll(int(left_s * 1000))
                self._loop.take_messages(_receive(self._listeners))
            self._registry.refuse(end.reason, end.kind)
            self._wait_for_goodbyes()
        elif end.exit_code == EXIT_WORKER_LOST:
            _log.error("%s", end.reason)
            for identity in self._registry.clients:
                self._registry.reply(identity, EngineDead(end.reason))
            self._wait_for_goodbyes()

    def _wait_for_goodbyes(self) -> None:
        """Wait until all clients, which were told that the engine ends, have said Goodbye.

        A DEALER with ZMQ_IMMEDIATE drops what it has not read yet when the connection ends: leaving right
        after sending would lose the reason.
        """
        deadline = time.monotonic() + GOODBYE_TIMEOUT_S
        self._registry.deliver()
        while self._registry.clients and (left_s := deadline - time.monotonic()) > 0:
            if self._client_poller.poll(int(left_s * 1000)):
                self._loop.take_messages(_receive(self._listeners))
            self._registry.deliver()


def _receive(listeners: Iterable[ClientListener]) -> Iterator[tuple[bytes, list[bytes]]]:
    for listener in listeners:
        yield from listener.receive()


def name_engine(args: CoreArgs) -> str:
    """The prefix of this engine's log lines: with its number, if there are several engines."""
    parallel = args.config.parallel
    if args.roster is not None:
        return f"quire engine {args.engine_index}"
    return f"quire engine {parallel.data_parallel_rank}" if parallel.data_parallel_size > 1 else "quire"


def main() -> NoReturn:
    """Entry point of `python -m quire.core`."""
    started_at = time.time()
    lifeline = Lifeline()
    lifeline.watch(grace_s=PARENT_LOST_GRACE_S)
    enable_stack_dumps()
    raise_file_limit()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    args = decode_msgpack(lifeline.args, CoreArgs)
    start_logging(name_engine(args), args.config.log_level, args.config.log_format)
    sys.exit(EngineCoreProcess(args, lifeline.fd, started_at).run())
