"""A worker process: the loop that takes steps from a socket and answers them.

It knows the protocol of ipc/protocol/step.py and Worker's methods, and nothing of models.
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

from ..ipc.decoding import decode_msgpack
from ..ipc.errors import QuireError
from ..ipc.processes.child_args import SPARE_ROLE, WorkerArgs
from ..ipc.processes.collector import paused_collector
from ..ipc.processes.fault_hooks import make_fault_hooks
from ..ipc.processes.log_lines import start_logging
from ..ipc.processes.process import EXIT_DEVICE_LOST, EXIT_START_FAILED, Lifeline, enable_stack_dumps
from ..ipc.processes.process_limits import describe_shortage, raise_file_limit
from ..ipc.processes.spare import SPARE_GRACE_S, wait_for_adoption
from ..ipc.protocol.codec import make_step_codec
from ..ipc.protocol.sockets import connect_dealer
from ..ipc.protocol.step import (
    ModelRunnerOutput,
    ResetRows,
    SchedulerOutput,
    StepFailed,
    WorkerFailed,
    WorkerProgress,
)
from .torch_import import import_torch

if TYPE_CHECKING:  # it loads torch
    from .steps.model_runner import LaunchedStep

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
        """Start the worker and serve until the lifeline ends this process. Returns if the start failed."""
        try:
            self._note_phase("import torch")
            with paused_collector():  # only now, so that the core hears of this process before torch loads
                import_torch()
                from .worker import Worker

            args = self._args
            self._worker = Worker(args.config, self._note_phase, args.rank, args.group_path)
            ready = self._worker.start()
        except (QuireError, OSError, RuntimeError, MemoryError) as error:
            self._send(WorkerFailed(describe_shortage(error), type(error).__name__, traceback.format_exc()))
            self._context.destroy(linger=500)
            return EXIT_START_FAILED
        gc.freeze()  # the collector need not walk what start-up made, which stays
        self._send(ready)
        return self._serve()

    def _serve(self) -> NoReturn:
        launched: deque[LaunchedStep] = deque()
        max_ahead = 1 if self._worker.is_async else 0
        while True:
            # The device must not wait for its next step. So the last step in flight is collected only once it
            # is done; until then messages come first, as one may be the next step.
            if launched and (len(launched) > max_ahead or _is_done(launched[0])):
                self._collect_step(launched.popleft())
                continue
            if launched and not self._socket.poll(0):
                continue
            message = self._codec.decode(self._socket.recv_multipart())
            match message:
                case SchedulerOutput():
                    self._launch_step(message, launched)
                case ResetRows():
                    launched.clear()  # the core has forgotten them
                    self._reset_rows()
                case _:
                    _log.warning("message %s is not for a worker", type(message).__name__)

    def _launch_step(self, step: SchedulerOutput, launched: deque[LaunchedStep]) -> None:
        """Launch a step behind those in flight."""
        if not self._failed_step:  # after a failed step rows may be half updated until ResetRows
            try:
                if self._faults is not None:
                    self._faults.reach("worker.execute")
                launched.append(self._worker.launch(step))
                return
            except Exception as error:  # any error is the step's answer; the process lives on
                failure = self._describe_failure(step.step_id, error)
            while launched:  # answers come in the order of steps, and the earlier ones have not failed
                self._collect_step(launched.popleft())
            if not self._failed_step:
                self._failed_step = True
                self._send_failure(failure)
                return
        self._send_failure(StepFailed(step.step_id, "an earlier step failed"))

    def _collect_step(self, launched: LaunchedStep) -> None:
        if self._failed_step:
            self._send_failure(StepFailed(launched.step_id, "an earlier step failed"))
            return
        try:
            self._send_result(self._worker.collect(launched))
        except Exception as error:  # on a GPU a step may fail only here
            self._failed_step = True
            self._send_failure(self._describe_failure(launched.step_id, error))

    def _describe_failure(self, step_id: int, error: Exception) -> StepFailed:
        """The answer to a step that raised; ends this process if its device is lost."""
        self._worker.abort_group(error)
        if self._worker.is_lost(error):
            self._leave(error)
        return self._worker.describe_failure(step_id, error)

    def _reset_rows(self) -> None:
        try:
            self._worker.reset_rows()
        except Exception as error:
            if not self._worker.is_lost(error):
                raise
            self._leave(error)
        self._failed_step = False

    def _leave(self, error: Exception) -> NoReturn:
        """End this process, as its device computes nothing more.

        No step in flight is answered: the core looks for the culprit in all of them, as at any death.
        """
        _log.error("the device has failed\n%s", traceback.format_exc())
        reason = f"its device has failed: {type(error).__name__}: {_first_line(error)}"
        self._send(WorkerFailed(reason, type(error).__name__, traceback.format_exc()))
        self._context.destroy(linger=500)
        os._exit(EXIT_DEVICE_LOST)

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
        elif failed.details:  # the rank that answers knows only that this one has aborted
            _log.error("rank %d: %s\n%s", self._args.rank, failed.error, failed.details)

    def _send(self, message: msgspec.Struct) -> None:
        self._socket.send_multipart(self._codec.encode(message))


def _is_done(launched: LaunchedStep) -> bool:
    """Whether the step can be collected without waiting, or has failed."""
    try:
        return launched.is_done
    except Exception:
        return True


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def main() -> None:
    """Entry point of `python -m quire.worker`."""
    lifeline = Lifeline()
    is_spare = SPARE_ROLE in sys.argv[1:]
    # A worker owns nothing that must be kept: without its core it leaves at once.
    lifeline.watch(grace_s=SPARE_GRACE_S if is_spare else 0.0)
    enable_stack_dumps()
    raise_file_limit()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    payload = lifeline.args
    if is_spare:
        with paused_collector():
            import_torch()  # most of a worker's start
            importlib.import_module(".worker", __package__)
        payload = wait_for_adoption(payload.decode(), lifeline)
    args = decode_msgpack(payload, WorkerArgs)
    start_logging("quire worker", args.config.log_level, args.config.log_format)
    code = WorkerProcess(args).run()
    os._exit(code)  # torch's teardown takes 0.3 s, and the kernel frees all anyway
