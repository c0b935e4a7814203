"""Executors: how the core's steps reach a worker and its answers come back. `make_executor` chooses.

ProcessExecutor starts one worker process and speaks step.py with it over a socket. InProcessExecutor runs
the worker right here, for debugging and for a single-process `LLM`. Neither knows what a step means.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from ..ipc.codec import make_step_codec
from ..ipc.config import EngineConfig
from ..ipc.errors import QuireError
from ..ipc.launch import WORKER_MODULE, WorkerLaunch
from ..ipc.process import ChildProcess
from ..ipc.sockets import WORKER_HEARTBEAT_TIMEOUT_MS, bind_router
from ..ipc.step import (
    ModelRunnerOutput,
    ResetRows,
    SchedulerOutput,
    StepFailed,
    WorkerFailed,
    WorkerProgress,
    WorkerReady,
)

_log = logging.getLogger(__name__)

WORKER_IDENTITY = b"worker-0"
# Threads that wait for each other must sleep, not spin: beside one busy process a step of two spinning
# threads took 7 to 10 times as long, and sleeping costs nothing measurable on an idle machine.
WORKER_ENV = {"OMP_WAIT_POLICY": "passive"}


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The worker has ended without being asked to; `reason` says how."""

    reason: str


ExecutorEvent = ModelRunnerOutput | StepFailed | WorkerReady | WorkerFailed | WorkerProgress | WorkerLost


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

    @abstractmethod
    def register(self, poller: zmq.Poller) -> None:
        """Add what becomes readable when `receive` would return something."""

    @abstractmethod
    def stop(self, grace_s: float) -> None:
        """End the worker within `grace_s`. Idempotent."""

    @property
    @abstractmethod
    def pids(self) -> dict[str, int]:
        """Role -> pid of the processes this executor started."""


def make_executor(
    config: EngineConfig, context: zmq.Context[zmq.Socket[bytes]] | None, address: str
) -> Executor:
    """The executor that `config.parallel.executor_backend` names; `address` is for its worker socket."""
    if config.parallel.executor_backend == "uni":
        return InProcessExecutor(config)
    assert context is not None, "a process executor needs a socket context"
    return ProcessExecutor(config, context, address)


class ProcessExecutor(Executor):
    """One worker process behind a ROUTER that this side binds."""

    def __init__(self, config: EngineConfig, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._config = config
        self._address = address
        self._codec = make_step_codec()
        self._socket = bind_router(context, address, heartbeat_timeout_ms=WORKER_HEARTBEAT_TIMEOUT_MS)
        self._child: ChildProcess | None = None
        self._poller: zmq.Poller | None = None

    def start(self) -> None:
        launch = WorkerLaunch(address=self._address, rank=0, config=self._config)
        env = {name: os.environ.get(name, value) for name, value in WORKER_ENV.items()}
        self._child = ChildProcess.start(WORKER_MODULE, "worker", msgspec.msgpack.encode(launch), env)
        if self._poller is not None:
            self._poller.register(self._child.pid_fd, zmq.POLLIN)

    def submit(self, step: SchedulerOutput) -> None:
        self._send(step)

    def reset_rows(self) -> None:
        self._send(ResetRows())

    def receive(self) -> list[ExecutorEvent]:
        events: list[ExecutorEvent] = []
        while True:
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if identity == WORKER_IDENTITY:
                events.append(self._codec.decode(frames))
        # Looked at after the drain: what the worker said before it ended is not lost.
        if self._child is not None and self._child.exit_code is not None:
            reason = self._child.describe_exit()
            self._forget_child(grace_s=0.0)
            if not any(isinstance(event, WorkerFailed) for event in events):
                events.append(WorkerLost(reason))
        return events

    def register(self, poller: zmq.Poller) -> None:
        self._poller = poller
        poller.register(self._socket, zmq.POLLIN)
        if self._child is not None:
            poller.register(self._child.pid_fd, zmq.POLLIN)

    def stop(self, grace_s: float) -> None:
        self._forget_child(grace_s)
        self._socket.close(linger=0)

    @property
    def pids(self) -> dict[str, int]:
        return {} if self._child is None else {"worker": self._child.pid}

    def _forget_child(self, grace_s: float) -> None:
        if self._child is None:
            return
        if self._poller is not None:
            self._poller.unregister(self._child.pid_fd)
        self._child.stop(grace_s)
        self._child = None

    def _send(self, message: msgspec.Struct) -> None:
        try:
            self._socket.send_multipart((WORKER_IDENTITY, *self._codec.encode(message)), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # The worker is gone or stuck; its end, seen by pid_fd, is what the core acts on.
            _log.warning("step not delivered to the worker: %s", error)


class InProcessExecutor(Executor):
    """The worker in this process: a step runs inside `submit`. Loads torch here, which nothing else does."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._worker: Any = None
        self._events: deque[ExecutorEvent] = deque()
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
        if self._is_broken:
            self._events.append(StepFailed(step.step_id, "an earlier step failed"))
            return
        try:
            self._events.append(self._worker.execute(step))
        except Exception as error:  # any failure of a step is the step's answer, not this process's end
            self._is_broken = True
            cause = f"{type(error).__name__}: {error}"
            self._events.append(StepFailed(step.step_id, cause, traceback.format_exc()))

    def reset_rows(self) -> None:
        self._worker.reset_rows()
        self._is_broken = False

    def receive(self) -> list[ExecutorEvent]:
        events = list(self._events)
        self._events.clear()
        return events

    def register(self, poller: zmq.Poller) -> None:
        """Nothing to wait for: every event is there when `start` or `submit` returns."""

    def stop(self, grace_s: float) -> None:
        del grace_s
        self._worker = None

    @property
    def pids(self) -> dict[str, int]:
        return {}
