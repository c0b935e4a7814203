"""Executors: how the core's steps reach a worker and its answers come back. `make_executor` chooses.

ProcessExecutor has a worker process a rank at a WorkerPlace and speaks step.py with them. InProcessExecutor
runs the worker right here, for debugging and for a single-process `LLM`. Neither knows what a step means.
"""

from __future__ import annotations

import importlib
import logging
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from ...ipc.errors import ProtocolError, QuireError
from ...ipc.processes.fault_hooks import make_fault_hooks
from ...ipc.processes.process import ProcessHandle
from ...ipc.protocol.codec import make_step_codec
from ...ipc.protocol.step import (
    ResetRows,
    SchedulerOutput,
    StepFailed,
    WorkerFailed,
    WorkerProgress,
    WorkerReady,
)
from ...ipc.spec.config import EngineConfig
from .local_place import LocalPlace
from .place import WorkerPlace
from .worker_group import StepWatch, WorkerEvent, WorkerGroup, name_roles

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The worker has ended by itself; `reason` says how."""

    reason: str
    is_overdue: bool = False  # its oldest step took longer than a step may


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

    def expect_tests(self, is_searching: bool) -> None:
        """Set whether further steps belong to a search for a culprit (blame.py)."""
        del is_searching

    @abstractmethod
    def reset_rows(self) -> None:
        """Make the worker forget all rows, after the steps already submitted."""

    @abstractmethod
    def receive(self) -> list[ExecutorEvent]:
        """Events that have arrived, without waiting."""

    @property
    def next_check_at(self) -> float | None:
        """When `receive` is due although nothing has become readable, None if never. Monotonic."""
        return None

    def configure(self, config: EngineConfig) -> bool:  # noqa: ARG002
        """Start further workers with this config; False if every worker gets the same one."""
        return False

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
    if config.parallel.executor_backend == "ray":
        from ..network.ray.ray_place import RayPlace  # with what only it needs

        return ProcessExecutor(config, RayPlace(config))
    return ProcessExecutor(config, LocalPlace(config, context, address))


class ProcessExecutor(Executor):
    """One worker at a time, of a process a rank, at a place that is opened anew for each.

    A worker that runs and makes no progress (a step or the start takes too long, its connection has ended, a
    frame does not decode) is given up by its ChildWatch, and is then lost like any other. The loss of a rank
    is the loss of the worker.
    """

    def __init__(self, config: EngineConfig, place: WorkerPlace) -> None:
        self._config = config
        self._place = place
        self._codec = make_step_codec()
        self._faults = make_fault_hooks(config.fault_hooks, "core")
        self._num_starts = 0
        self._roles = name_roles(config.parallel.num_ranks)
        self._rank_of = {f"worker-{rank}".encode(): rank for rank in range(len(self._roles))}
        self._workers = WorkerGroup(config.parallel, self._start_process, is_elsewhere=place.is_elsewhere)
        self._is_searching = False
        self._steps = StepWatch(config.step_timeout_s)
        self._is_muted = False  # further messages of the worker are ignored
        self._is_overdue = False  # because its step took too long
        self._is_leaving = False  # its start has failed: its connection ends before its process
        self._poller = zmq.Poller()  # a stand-in until `register`

    def start(self) -> None:
        self._forget_worker(grace_s=0.0)  # a worker that failed to start may not have left yet
        self._close_place()
        self._num_starts += 1
        self._place.open()
        for socket in self._place.sockets:
            self._poller.register(socket, zmq.POLLIN)
        self._steps.begin_start(self._workers.start(), self._config.ready_timeout_s, time.monotonic())
        self._is_muted = self._is_overdue = self._is_leaving = False
        for process in self._workers.processes:
            self._poller.register(process.pid_fd, zmq.POLLIN)

    def submit(self, step: SchedulerOutput) -> None:
        self._steps.add_step(step.step_id, time.monotonic(), sum(step.num_tokens), is_test=self._is_searching)
        self._send(step)

    def expect_tests(self, is_searching: bool) -> None:
        self._is_searching = is_searching

    def reset_rows(self) -> None:
        self._steps.forget_steps()
        self._send(ResetRows())

    def receive(self) -> list[ExecutorEvent]:
        events = self._receive_frames()
        now = time.monotonic()
        self._workers.look(now)
        if self._workers.is_given_up and not self._is_muted and self._steps.is_overdue(now):
            self._is_muted = self._is_overdue = True  # the step may still end before the worker does
        # Look for its end only after all its messages: none is lost, and no step pays two system calls.
        if len(self._roles) > 1 and any(isinstance(event, StepFailed) for event in events):
            return self._find_end() or events  # one rank's end may be why the others failed
        return events or self._find_end()

    @property
    def next_check_at(self) -> float | None:
        return self._workers.next_check_at

    def configure(self, config: EngineConfig) -> bool:
        self._config = config
        return True

    def register(self, poller: zmq.Poller) -> None:
        self._poller = poller
        for socket in (*self._place.sockets, *(process.pid_fd for process in self._workers.processes)):
            poller.register(socket, zmq.POLLIN)

    def stop(self, grace_s: float) -> None:
        self._place.stop()
        self._forget_worker(grace_s)
        self._close_place()

    @property
    def pids(self) -> dict[str, int]:
        return {process.role: process.pid for process in self._workers.processes}

    def _start_process(self, rank: int, fd: int | None) -> ProcessHandle:
        config = self._config if self._num_starts == 1 else self._config.for_replacement()
        return self._place.start(rank, fd, config)

    def _close_place(self) -> None:
        for socket in self._place.sockets:
            self._poller.unregister(socket)
        self._place.close()

    def _receive_frames(self) -> list[ExecutorEvent]:
        events: list[ExecutorEvent] = []
        while (message := self._place.receive()) is not None:
            identity, frames = message
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
            if isinstance(event, WorkerReady):
                self._place.note_ready()
            self._is_leaving |= isinstance(event, WorkerFailed)
            events.append(event)
        return events

    def _find_end(self) -> list[ExecutorEvent]:
        """WorkerLost if a process has ended. A worker whose connection has ended is given up."""
        workers = self._workers
        if workers.has_ended:
            return [WorkerLost(self._forget_worker(grace_s=0.0), self._is_overdue)]
        if not workers.is_given_up and self._place.has_lost_connection() and not self._is_leaving:
            workers.give_up("its connection has ended, or it answered no heartbeat", time.monotonic())
        return []

    def _forget_worker(self, grace_s: float) -> str:
        """End the worker, if there is one. Returns how it has ended."""
        for process in self._workers.processes:
            self._poller.unregister(process.pid_fd)
        return self._workers.stop(grace_s)

    def _send(self, message: msgspec.Struct) -> None:
        frames = self._codec.encode(message)
        if self._faults is not None:
            frames = self._faults.corrupt("core.step_frame", frames)
        for identity, rank in self._rank_of.items():
            try:
                self._place.send(identity, frames)
            except zmq.ZMQError as error:
                # The worker is gone or stuck; its end, or the step's time-out, is what the core acts on.
                _log.warning("step not delivered to the %s: %s", self._roles[rank], error)


class InProcessExecutor(Executor):
    """The worker in this process: `receive` runs one step. Loads torch here, which nothing else does."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._worker: Any = None
        self._events: list[ExecutorEvent] = []  # of the start
        self._queue: deque[SchedulerOutput | ResetRows] = deque()
        self._is_broken = False

    def start(self) -> None:
        # Imported by name: core knows worker here only, and only with this backend.
        worker_module = importlib.import_module("...worker.worker", __package__)
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
        except Exception as error:  # a failure is the step's answer, not this process's end
            self._is_broken = True
            return self._worker.describe_failure(step.step_id, error)

    def stop(self, grace_s: float) -> None:
        del grace_s
        self._worker = None
