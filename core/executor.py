"""Executors: how the core's steps reach a worker and its answers come back. `make_executor` chooses.

ProcessExecutor starts a worker process a rank and speaks step.py with them over a socket. InProcessExecutor
runs the worker right here, for debugging and for a single-process `LLM`. Neither knows what a step means.
"""

from __future__ import annotations

import importlib
import logging
import os
import secrets
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import zmq

from ..ipc.codec import make_step_codec
from ..ipc.config import EngineConfig
from ..ipc.errors import ProtocolError, QuireError
from ..ipc.fault_hooks import make_fault_hooks
from ..ipc.processes.child_args import SPARE_ROLE, WORKER_MODULE, GroupArgs, WorkerArgs
from ..ipc.processes.process import ChildProcess, ProcessHandle
from ..ipc.processes.spare import WarmSpare, find_spare_path
from ..ipc.sockets import NOBLOCK, WORKER_HEARTBEAT_TIMEOUT_MS, bind_router, has_message, send_to
from ..ipc.step import (
    ResetRows,
    SchedulerOutput,
    StepFailed,
    WorkerFailed,
    WorkerProgress,
    WorkerReady,
)
from .faults.step_watch import StepWatch
from .worker_group import WorkerEvent, WorkerGroup, name_roles

_log = logging.getLogger(__name__)

_LIFE_BYTES = 3
# Threads that wait for each other must sleep, not spin: beside one busy process a step of two spinning
# threads took 7 to 10 times as long, and sleeping costs nothing measurable on an idle machine.
WORKER_ENV = {"OMP_WAIT_POLICY": "passive"}


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The worker has ended without being asked to; `reason` says how."""

    reason: str


ExecutorEvent = WorkerEvent | WorkerLost


class Executor(ABC):
    """Runs steps in the order they are submitted and answers each with one event, in the same order.

    After `start` come WorkerProgress events and then WorkerReady or WorkerFailed. WorkerLost may come at any
    time after that and means that every step in flight is gone; `start` begins anew.
    """

    @abstractmethod
    def start(self) -> None:
        """Begin to start a worker."""

    @abstractmethod
    def submit(self, step: SchedulerOutput) -> None:
        """Queue a step."""

    @abstractmethod
    def reset_rows(self) -> None:
        """Make the worker forget all rows, after the steps already submitted."""

    @abstractmethod
    def receive(self) -> list[ExecutorEvent]:
        """Events that have arrived, without waiting."""

    @property
    def next_check_at(self) -> float | None:
        """When `receive` is to be called though nothing has become readable, None if never. Monotonic."""
        return None

    def register(self, poller: zmq.Poller) -> None:
        """Add what becomes readable when `receive` would return something; nothing by default."""
        del poller

    @abstractmethod
    def stop(self, grace_s: float) -> None:
        """End the worker within `grace_s`. Idempotent."""

    @property
    def pids(self) -> dict[str, int]:
        """Role -> pid of the processes this executor started."""
        return {}


def make_executor(config: EngineConfig, context: zmq.Context[zmq.Socket[bytes]], address: str) -> Executor:
    """The executor that `config.parallel.executor_backend` names; `address` is for its worker socket."""
    if config.parallel.executor_backend == "uni":
        return InProcessExecutor(config)
    return ProcessExecutor(config, context, address)


class ProcessExecutor(Executor):
    """One worker at a time, a process or one a rank, behind a ROUTER that this side binds anew for each.

    What an earlier worker has sent or is sent is gone with its socket. A worker that is there and does not
    get on (a step or the start takes too long, its connection has ended, it sends what does not decode) is
    given up by its ChildWatch, and is then lost like any other. A rank's loss is the worker's.
    """

    def __init__(self, config: EngineConfig, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._config = config
        self._context = context
        self._address = address
        self._life = secrets.token_hex(_LIFE_BYTES)
        _remove_sockets(address)
        self._codec = make_step_codec()
        self._faults = make_fault_hooks(config.fault_hooks, "core")
        self._num_starts = 0
        self._socket: zmq.Socket[bytes] | None = None
        self._connection: zmq.Socket[bytes] | None = None  # the socket's monitor
        self._roles = name_roles(config.parallel.num_ranks)
        self._rank_of = {f"worker-{rank}".encode(): rank for rank in range(len(self._roles))}
        num_stages = config.parallel.pipeline_parallel_size
        self._workers = WorkerGroup(len(self._roles), self._start_worker, num_stages)
        self._spare = WarmSpare(find_spare_path(address), self._start_spare)
        self._steps = StepWatch([], 0.0)  # of the worker, when there is one
        self._is_muted = False  # nothing that the worker says counts any more
        self._is_leaving = False  # it has said that its start failed: its connection ends before its process
        self._poller = zmq.Poller()  # nobody's, until `register`

    def start(self) -> None:
        self._forget_worker(grace_s=0.0)  # one that failed to start may still be about to leave
        self._unbind()
        self._num_starts += 1
        self._bind()
        self._steps = StepWatch(self._workers.start(), self._config.step_timeout_s)
        self._steps.begin_start(self._config.ready_timeout_s, time.monotonic())
        self._is_muted = self._is_leaving = False
        for process in self._workers.processes:
            self._poller.register(process.pid_fd, zmq.POLLIN)

    def submit(self, step: SchedulerOutput) -> None:
        self._steps.add_step(step.step_id, time.monotonic())
        self._send(step)

    def reset_rows(self) -> None:
        self._steps.forget_steps()
        self._send(ResetRows())

    def receive(self) -> list[ExecutorEvent]:
        events = self._receive_frames()
        self._workers.look(time.monotonic())
        # Its end is looked for when there is no more to hear of it: nothing that it said is lost, and a step
        # does not pay for two system calls.
        if len(self._roles) > 1 and any(isinstance(event, StepFailed) for event in events):
            return self._find_end() or events  # a rank's end may be why the others failed
        return events or self._find_end()

    @property
    def next_check_at(self) -> float | None:
        return self._workers.next_check_at

    def register(self, poller: zmq.Poller) -> None:
        self._poller = poller
        pid_fds = [process.pid_fd for process in self._workers.processes]
        for one in (self._socket, self._connection, *pid_fds):
            if one is not None:
                poller.register(one, zmq.POLLIN)

    def stop(self, grace_s: float) -> None:
        self._spare.stop()
        self._forget_worker(grace_s)
        self._unbind()

    @property
    def pids(self) -> dict[str, int]:
        return {process.role: process.pid for process in self._workers.processes}

    @property
    def _worker_address(self) -> str:
        # libzmq removes a closed socket's file some time later, so the next one has another name; and a
        # worker of the core before, which may be late to leave, must not come to this core's.
        return f"{self._address}{self._life}{self._num_starts % 10}"

    def _start_worker(self, rank: int, fd: int | None) -> ProcessHandle:
        """The spare if one waits, perhaps one that the core before this one has left; else a new process."""
        config = self._config if self._num_starts == 1 else self._config.for_replacement()
        group = None
        if fd is not None:
            num_stages = config.parallel.pipeline_parallel_size
            path = f"/proc/self/fd/{fd}"
            group = GroupArgs(size=len(self._roles), path=path, num_stages=num_stages)
        args = msgspec.msgpack.encode(
            WorkerArgs(address=self._worker_address, rank=rank, config=config, group=group)
        )
        role, pass_fds = self._roles[rank], () if fd is None else (fd,)
        spare = self._spare.adopt(role, args) if config.recovery.warm_spare else None
        return spare or ChildProcess.start(WORKER_MODULE, role, args, _make_worker_env(), pass_fds=pass_fds)

    def _start_spare(self, path: str) -> ChildProcess:
        return ChildProcess.start(WORKER_MODULE, SPARE_ROLE, path.encode(), _make_worker_env())

    def _bind(self) -> None:
        timeout_ms = WORKER_HEARTBEAT_TIMEOUT_MS if self._config.step_timeout_s else None
        self._socket = bind_router(self._context, self._worker_address, heartbeat_timeout_ms=timeout_ms)
        self._connection = self._socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED, f"inproc://worker-{self._num_starts}"
        )
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._connection, zmq.POLLIN)

    def _unbind(self) -> None:
        if self._socket is None or self._connection is None:
            return
        self._poller.unregister(self._socket)
        self._poller.unregister(self._connection)
        self._socket.disable_monitor()
        self._connection.close(linger=0)
        self._socket.close(linger=0)
        self._socket = self._connection = None
        # libzmq leaves it there until its context ends, or for good.
        Path(self._worker_address.removeprefix("ipc://")).unlink(missing_ok=True)

    def _receive_frames(self) -> list[ExecutorEvent]:
        events: list[ExecutorEvent] = []
        while self._socket is not None and has_message(self._socket):
            identity, *frames = self._socket.recv_multipart(NOBLOCK)
            rank = self._rank_of.get(identity)
            if rank is None or self._is_muted:
                continue
            try:
                event = self._workers.take(rank, self._codec.decode(frames))
            except ProtocolError as error:
                self._is_muted = True
                because = f"it sent a frame that does not decode: {error}"
                self._workers.give_up(because, time.monotonic(), rank)
                break
            if event is None:
                continue
            self._steps.note(event, time.monotonic())
            if isinstance(event, WorkerReady) and self._config.recovery.warm_spare:
                self._spare.keep()
            self._is_leaving |= isinstance(event, WorkerFailed)
            events.append(event)
        return events

    def _find_end(self) -> list[ExecutorEvent]:
        """WorkerLost if a process has ended; those whose connection has ended are given up."""
        workers = self._workers
        if workers.has_ended:
            return [WorkerLost(self._forget_worker(grace_s=0.0))]
        if not workers.is_given_up and self._has_lost_connection() and not self._is_leaving:
            workers.give_up("its connection has ended, or it answered no heartbeat", time.monotonic())
        return []

    def _has_lost_connection(self) -> bool:
        if self._connection is None or not has_message(self._connection):
            return False
        self._connection.recv_multipart(NOBLOCK)
        return True

    def _forget_worker(self, grace_s: float) -> str:
        """End the worker if there is one; returns how it has ended."""
        for process in self._workers.processes:
            self._poller.unregister(process.pid_fd)
        return self._workers.stop(grace_s)

    def _send(self, message: msgspec.Struct) -> None:
        frames = self._codec.encode(message)
        if self._faults is not None:
            frames = self._faults.corrupt("core.step_frame", frames)
        assert self._socket is not None
        for identity, rank in self._rank_of.items():
            try:
                send_to(self._socket, identity, frames)
            except zmq.ZMQError as error:
                # The worker is gone or stuck; its end, or the step's time-out, is what the core acts on.
                _log.warning("step not delivered to the %s: %s", self._roles[rank], error)


def _remove_sockets(address: str) -> None:
    """Delete what an earlier core has left of its workers' sockets."""
    path = Path(address.removeprefix("ipc://"))
    for leftover in path.parent.glob(f"{path.name}*"):
        leftover.unlink(missing_ok=True)


def _make_worker_env() -> dict[str, str]:
    return {name: os.environ.get(name, value) for name, value in WORKER_ENV.items()}


class InProcessExecutor(Executor):
    """The worker in this process: `receive` runs one step. Loads torch here, which nothing else does."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._worker: Any = None
        self._events: list[ExecutorEvent] = []  # of the start
        self._queue: deque[SchedulerOutput | ResetRows] = deque()
        self._is_broken = False

    def start(self) -> None:
        # Imported by name: core has no other tie to worker, and this one only where it is asked for.
        worker_module = importlib.import_module("..worker.worker", __package__)
        self._worker = worker_module.Worker(
            self._config, lambda phase: self._events.append(WorkerProgress(phase, time.time()))
        )
        try:
            self._events.append(self._worker.start())
        except (QuireError, OSError, RuntimeError) as error:
            self._events.append(WorkerFailed(str(error), type(error).__name__, traceback.format_exc()))

    def submit(self, step: SchedulerOutput) -> None:
        self._queue.append(step)

    def reset_rows(self) -> None:
        self._queue.append(ResetRows())

    def receive(self) -> list[ExecutorEvent]:
        events, self._events = self._events, []
        while self._queue and not events:
            message = self._queue.popleft()
            if isinstance(message, ResetRows):
                self._worker.reset_rows()
                self._is_broken = False
            else:
                events.append(self._execute(message))
        return events

    def _execute(self, step: SchedulerOutput) -> ExecutorEvent:
        if self._is_broken:
            return StepFailed(step.step_id, "an earlier step failed")
        try:
            return self._worker.execute(step)
        except Exception as error:  # any failure of a step is the step's answer, not this process's end
            self._is_broken = True
            return self._worker.describe_failure(step.step_id, error)

    def stop(self, grace_s: float) -> None:
        del grace_s
        self._worker = None
