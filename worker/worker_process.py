"""A worker process: the loop that takes steps from a socket and answers them. Knows the protocol of
ipc/step.py and Worker's three methods, nothing of models.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import time
import traceback

import msgspec
import zmq

from ..ipc.codec import make_step_codec
from ..ipc.errors import QuireError
from ..ipc.launch import WorkerLaunch
from ..ipc.process import EXIT_OK, EXIT_PARENT_LOST, EXIT_START_FAILED, Lifeline
from ..ipc.sockets import connect_dealer
from ..ipc.step import (
    ResetRows,
    SchedulerOutput,
    StepFailed,
    StopWorker,
    WorkerFailed,
    WorkerProgress,
)

_log = logging.getLogger(__name__)


class WorkerProcess:
    """One device's server: executes what the core sends, strictly in order."""

    def __init__(self, launch: WorkerLaunch) -> None:
        self._launch = launch
        self._codec = make_step_codec()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = connect_dealer(
            self._context.socket(zmq.DEALER), launch.address, f"worker-{launch.rank}".encode()
        )
        self._failed_step = False

    def run(self) -> int:
        """Start the worker and serve until told to stop. Returns the exit code."""
        try:
            self._note_phase("import torch")
            from .worker import Worker  # here, so that the core hears of this process before torch loads

            self._worker = Worker(self._launch.config, self._note_phase)
            ready = self._worker.start()
        except (QuireError, OSError, RuntimeError) as error:
            self._send(WorkerFailed(str(error), type(error).__name__, traceback.format_exc()))
            self._context.destroy(linger=500)
            return EXIT_START_FAILED
        gc.freeze()  # what start-up made lives for ever; the collector need not walk it
        self._send(ready)
        self._serve()
        self._context.destroy(linger=0)
        return EXIT_OK

    def _serve(self) -> None:
        while True:
            message = self._codec.decode(self._socket.recv_multipart())
            match message:
                case SchedulerOutput():
                    self._send(self._execute(message))
                case ResetRows():
                    self._worker.reset_rows()
                    self._failed_step = False
                case StopWorker():
                    return
                case _:
                    _log.warning("message %s is not for a worker", type(message).__name__)

    def _execute(self, step: SchedulerOutput) -> msgspec.Struct:
        if self._failed_step:  # rows may be half updated until the core has them reset
            return StepFailed(step.step_id, "an earlier step failed")
        try:
            return self._worker.execute(step)
        except Exception as error:  # whatever a step raises is that step's answer; the process lives on
            self._failed_step = True
            return StepFailed(step.step_id, f"{type(error).__name__}: {error}", traceback.format_exc())

    def _note_phase(self, phase: str) -> None:
        self._send(WorkerProgress(phase, time.time()))

    def _send(self, message: msgspec.Struct) -> None:
        self._socket.send_multipart(self._codec.encode(message))


def main() -> None:
    """Entry point of `python -m quire.worker`."""
    lifeline = Lifeline()
    # A worker owns nothing that anybody would miss: without a core it leaves at once.
    lifeline.watch(on_lost=lambda: os._exit(EXIT_PARENT_LOST), grace_s=0.0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    launch = msgspec.msgpack.decode(lifeline.launch, type=WorkerLaunch)
    logging.basicConfig(level=launch.config.log_level, format="quire worker: %(message)s")
    code = WorkerProcess(launch).run()
    os._exit(code)  # torch's teardown takes 0.3 s and frees nothing that the kernel would not
