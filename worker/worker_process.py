"""A worker process: the loop that takes steps from a socket and answers them. Knows the protocol of
ipc/step.py and Worker's three methods, nothing of models.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import signal
import sys
import time
import traceback
from collections import deque
from typing import TYPE_CHECKING, NoReturn

import msgspec
import zmq

from ..ipc.codec import make_step_codec
from ..ipc.errors import QuireError
from ..ipc.fault_hooks import make_fault_hooks
from ..ipc.processes.child_args import SPARE_ROLE, WorkerArgs
from ..ipc.processes.log_lines import start_logging
from ..ipc.processes.process import EXIT_START_FAILED, Lifeline, enable_stack_dumps
from ..ipc.processes.process_limits import raise_file_limit
from ..ipc.processes.spare import SPARE_GRACE_S, wait_for_adoption
from ..ipc.sockets import connect_dealer
from ..ipc.step import (
    ModelRunnerOutput,
    ResetRows,
    SchedulerOutput,
    StepFailed,
    WorkerFailed,
    WorkerProgress,
)

if TYPE_CHECKING:  # it loads torch
    from .model_runner import LaunchedStep

_log = logging.getLogger(__name__)


class WorkerProcess:
    """One device's server: executes what the core sends, strictly in order."""

    def __init__(self, args: WorkerArgs) -> None:
        self._args = args
        self._codec = make_step_codec()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = connect_dealer(
            self._context.socket(zmq.DEALER),
            args.address,
            f"worker-{args.rank}".encode(),
            keys=args.keys,
        )
        self._failed_step = False
        self._faults = make_fault_hooks(args.config.fault_hooks, "worker", args.rank)

    def run(self) -> int:
        """Start the worker and serve until the lifeline ends this process; returns only if that failed."""
        try:
            self._note_phase("import torch")
            from .worker import Worker  # here, so that the core hears of this process before torch loads

            args = self._args
            self._worker = Worker(args.config, self._note_phase, args.rank, args.group)
            ready = self._worker.start()
        except (QuireError, OSError, RuntimeError, MemoryError) as error:
            self._send(WorkerFailed(str(error), type(error).__name__, traceback.format_exc()))
            self._context.destroy(linger=500)
            return EXIT_START_FAILED
        gc.freeze()  # what start-up made lives for ever; the collector need not walk it
        self._send(ready)
        return self._serve()

    def _serve(self) -> NoReturn:
        launched: deque[LaunchedStep] = deque()
        max_ahead = 1 if self._worker.is_async else 0
        while True:
            # While the device works, a waiting message comes first: it may be the next step to launch.
            if launched and (len(launched) > max_ahead or not self._socket.poll(0)):
                self._collect_step(launched.popleft())
                continue
            message = self._codec.decode(self._socket.recv_multipart())
            match message:
                case SchedulerOutput():
                    step = self._launch_step(message)
                    if step is not None:
                        launched.append(step)
                case ResetRows():
                    launched.clear()  # their rows are void, and the core has forgotten them
                    self._worker.reset_rows()
                    self._failed_step = False
                case _:
                    _log.warning("message %s is not for a worker", type(message).__name__)

    def _launch_step(self, step: SchedulerOutput) -> LaunchedStep | None:
        if self._failed_step:  # rows may be half updated until the core has them reset
            self._send_failure(StepFailed(step.step_id, "an earlier step failed"))
            return None
        try:
            if self._faults is not None:
                self._faults.reach("worker.execute")
            return self._worker.launch(step)
        except Exception as error:  # whatever a step raises is that step's answer; the process lives on
            self._fail(step.step_id, error)
            return None

    def _collect_step(self, launched: LaunchedStep) -> None:
        if self._failed_step:
            self._send_failure(StepFailed(launched.step_id, "an earlier step failed"))
            return
        try:
            self._send_result(self._worker.collect(launched))
        except Exception as error:  # on a GPU a step's failure may show only here
            self._fail(launched.step_id, error)

    def _fail(self, step_id: int, error: Exception) -> None:
        self._failed_step = True
        self._worker.abort_group(error)
        self._send_failure(self._worker.describe_failure(step_id, error))

    def _note_phase(self, phase: str) -> None:
        self._send(WorkerProgress(phase, time.time()))
        if self._faults is not None:
            self._faults.reach("worker.start")

    def _send_result(self, result: ModelRunnerOutput) -> None:
        if not self._args.speaks:
            return
        frames = self._codec.encode(result)
        if self._faults is not None:
            frames = self._faults.corrupt("worker.result_frame", frames)
        self._socket.send_multipart(frames)

    def _send_failure(self, failed: StepFailed) -> None:
        if self._args.speaks:
            self._send(failed)
        elif failed.details:  # who speaks will only know that this one has aborted
            _log.error("rank %d: %s\n%s", self._args.rank, failed.error, failed.details)

    def _send(self, message: msgspec.Struct) -> None:
        self._socket.send_multipart(self._codec.encode(message))


def main() -> None:
    """Entry point of `python -m quire.worker`."""
    lifeline = Lifeline()
    is_spare = SPARE_ROLE in sys.argv[1:]
    # A worker owns nothing that anybody would miss: without a core it leaves at once.
    lifeline.watch(grace_s=SPARE_GRACE_S if is_spare else 0.0)
    enable_stack_dumps()
    raise_file_limit()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    payload = lifeline.args
    if is_spare:
        importlib.import_module(".worker", __package__)  # torch, which takes most of a start
        payload = wait_for_adoption(payload.decode(), lifeline)
    args = msgspec.msgpack.decode(payload, type=WorkerArgs)
    start_logging("quire worker", args.config.log_level, args.config.log_format)
    code = WorkerProcess(args).run()
    os._exit(code)  # torch's teardown takes 0.3 s and frees nothing that the kernel would not
