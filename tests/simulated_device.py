"""A device, a core and a clock that are simulated around WorkerProcess's own loop.

Calls cost what they cost a worker on a GPU; the device computes step after step. Errors can be laid into it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from quire.ipc.protocol.codec import make_step_codec
from quire.ipc.protocol.step import ModelRunnerOutput, ResetRows, SchedulerOutput, StepFailed
from quire.worker.devices import is_out_of_memory, is_sticky
from quire.worker.worker_process import WorkerProcess

POLL_S, QUERY_S, LAUNCH_S, COLLECT_S = 4e-6, 2e-6, 150e-6, 40e-6
REPLY_S = 120e-6  # from a worker's answer to the core's next step at the worker
STEPS_IN_FLIGHT = 2


class EndOfSimulation(BaseException):
    """So many steps have been answered; nothing in the loop may catch it."""


class Exited(BaseException):
    """The process has ended itself."""


@dataclass
class SimulatedStep:
    """What `launch` gives back."""

    step_id: int
    ends_at: float
    device: SimulatedDevice

    @property
    def is_done(self) -> bool:
        self.device.now += QUERY_S
        return self.device.now >= self.ends_at


@dataclass
class SimulatedDevice:
    """A worker's device; steps take `step_s` each, those in `errors` raise at launch or when collected."""

    step_s: float
    launch_errors: dict[int, Exception] = field(default_factory=dict[int, Exception])
    collect_errors: dict[int, Exception] = field(default_factory=dict[int, Exception])
    reset_error: Exception | None = None
    now: float = 0.0
    free_at: float = 0.0
    is_async: bool = True

    def launch(self, step: SchedulerOutput) -> SimulatedStep:
        self.now += LAUNCH_S
        if error := self.launch_errors.pop(step.step_id, None):
            raise error
        self.free_at = max(self.now, self.free_at) + self.step_s
        return SimulatedStep(step.step_id, self.free_at, self)

    def collect(self, step: SimulatedStep) -> ModelRunnerOutput:
        self.now = max(self.now, step.ends_at) + COLLECT_S
        if error := self.collect_errors.pop(step.step_id, None):
            raise error
        return ModelRunnerOutput(step.step_id, [0], [7])

    def reset_rows(self) -> None:
        if self.reset_error is not None:
            raise self.reset_error

    def is_lost(self, error: Exception) -> bool:
        return is_sticky(error)

    def abort_group(self, error: Exception) -> None:
        """There is no group."""

    def describe_failure(self, step_id: int, error: Exception) -> StepFailed:
        return StepFailed(step_id, str(error), "", is_out_of_memory(error))


class SimulatedCore:
    """The worker's socket, with a core at its other end that keeps two steps in flight."""

    def __init__(self, device: SimulatedDevice, num_steps: int) -> None:
        self._device, self._num_steps = device, num_steps
        self._codec = make_step_codec()
        self._next_id = 0
        self._arriving: deque[tuple[float, list[bytes]]] = deque()
        self.answers: list[Any] = []
        self.answered_at: list[float] = []
        for _ in range(STEPS_IN_FLIGHT):
            self._send_step(0.0)

    def poll(self, timeout_ms: int) -> int:
        assert timeout_ms == 0
        self._device.now += POLL_S
        return int(bool(self._arriving) and self._arriving[0][0] <= self._device.now)

    def recv_multipart(self) -> list[bytes]:
        if not self._arriving:
            raise EndOfSimulation
        arrives_at, frames = self._arriving.popleft()
        self._device.now = max(self._device.now, arrives_at)
        return frames

    def send_multipart(self, frames: list[bytes]) -> None:
        answer = self._codec.decode([bytes(frame) for frame in frames])
        self.answers.append(answer)
        self.answered_at.append(self._device.now)
        if len(self.answers) == self._num_steps:
            raise EndOfSimulation
        if isinstance(answer, StepFailed) and answer.error != "an earlier step failed":
            self._arriving.append((self._device.now + REPLY_S, self._codec.encode(ResetRows())))
        self._send_step(self._device.now + REPLY_S)

    def _send_step(self, arrives_at: float) -> None:
        step = SchedulerOutput(self._next_id, [0], [1])
        self._next_id += 1
        self._arriving.append((arrives_at, self._codec.encode(step)))


def serve(device: SimulatedDevice, num_steps: int) -> SimulatedCore:
    """Run the worker's loop until it has answered so many steps, or has ended itself."""
    process = object.__new__(WorkerProcess)
    core = SimulatedCore(device, num_steps)
    process._args = type("Args", (), {"speaks": True, "rank": 0})()
    process._codec = make_step_codec()
    process._context = type("Context", (), {"destroy": lambda _self, linger: None})()  # noqa: ARG005
    process._socket = core
    process._worker = device
    process._failed_step = False
    process._faults = None
    try:
        process._serve()
    except EndOfSimulation:
        return core


def mean_step_s(core: SimulatedCore) -> float:
    """Time from answer to answer, without the first steps."""
    return float(np.diff(core.answered_at[10:]).mean())
