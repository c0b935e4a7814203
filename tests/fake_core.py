"""`python -m fake_core`: the real engine core process with FakeWorker in place of a worker process.

Faults are asked for by request id: "poison..." makes the step that computes it fail, "lethal..." kills the
worker each time, "once..." the first time, "late..." at each LATE_STEPS-th step, "crash..." the core itself.
After "once-fails" the next worker does not start, after "once-failsalways" none does. The model name
"missing" fails the start, "refused-later" every start but the first, "unready" never gets a worker; "told"
does what is in the file `model`: "missing", "short" of memory, "killed", "older" than its clients, or
"unready" until it says something else; with "shrinks" the first core's second worker has fewer blocks;
"paced" waits 4 ms a step, so that there is time to do something to it. In the role of a supervisor it is the
real one, over fake cores, which it forks.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

import zmq
from fakes import FakeWorker
from forked import patch_process
from quire.core.clients import client_registry
from quire.core.engine import engine_process
from quire.core.supervision import supervisor
from quire.core.workers.executor import Executor, ExecutorEvent, WorkerLost
from quire.ipc.daemon.daemon_state import SUPERVISOR_ROLE
from quire.ipc.processes import liveness
from quire.ipc.protocol.messages import PROTOCOL_VERSION
from quire.ipc.protocol.step import SchedulerOutput, WorkerFailed, WorkerProgress, WorkerReady
from quire.ipc.spec.config import EngineConfig

NUM_BLOCKS = 256
STEP_TIME_S = 0.004
LATE_STEPS = 4


class FakeProcessExecutor(Executor):
    """FakeWorker behind the executor interface; results are there when `submit` returns."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._worker = FakeWorker(config, NUM_BLOCKS)
        self._events: list[ExecutorEvent] = []
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._is_dead = False
        self._has_died = False
        self._num_failing_starts = 0
        self._late_rows: dict[int, int] = {}  # of requests that kill late -> steps that they were in
        shrinks = config.model.served_model_name == "shrinks" and _is_first_start(config)
        self._num_blocks_later = NUM_BLOCKS - shrinks
        self._num_blocks = NUM_BLOCKS  # of the next worker

        if config.model.served_model_name == "told" and Path(config.model.model).read_text() == "older":
            client_registry.PROTOCOL_VERSION = PROTOCOL_VERSION - 1

    def start(self) -> None:
        name = self._config.model.served_model_name
        if name == "told":
            threading.Thread(target=self._start_as_told, daemon=True).start()
            return
        self._start_as(name)

    def _start_as_told(self) -> None:
        file = Path(self._config.model.model)
        while (name := file.read_text()) in ("", "unready"):  # "": it is being written
            time.sleep(STEP_TIME_S)
        self._start_as(name)

    def _start_as(self, name: str) -> None:
        if name == "missing" or (name == "refused-later" and not _is_first_start(self._config)):
            self._tell(WorkerFailed(f"model={name!r}: expected a folder", "ModelError"))
            return
        if name == "unready":
            self._tell(WorkerProgress("load fake weights", 1.0))
            return
        if name == "short":
            self._tell(WorkerFailed("no memory just now", "OutOfMemoryError"))
            return
        if name == "killed":
            self._tell(WorkerLost("worker (pid 1) was killed by SIGKILL"))
            return
        if self._num_failing_starts:
            self._num_failing_starts -= 1
            self._tell(WorkerFailed("no memory just now", "OutOfMemoryError"))
            return
        self._is_dead = False
        self._late_rows.clear()
        self._worker.lose()
        self._tell(WorkerProgress("load fake weights", 1.0))
        self._tell(WorkerReady(self._num_blocks, "fake", [("weights", 1)]))
        self._num_blocks = self._num_blocks_later

    def submit(self, step: SchedulerOutput) -> None:
        if self._is_dead:
            return
        kinds = {new.request_id.partition("-")[0] for new in step.new_requests}
        if "crash" in kinds:
            os._exit(7)
        is_late = self._is_late(step)
        if is_late or "lethal" in kinds or ("once" in kinds and not self._has_died):
            self._is_dead = self._has_died = True
            ids = {new.request_id for new in step.new_requests}
            self._num_failing_starts = 1000 if "once-failsalways" in ids else int("once-fails" in ids)
            self._tell(WorkerLost("worker (pid 1) was killed by SIGKILL"))
            return
        self._worker.poisoned.update(
            new.request_id for new in step.new_requests if "poison" in new.request_id
        )
        if self._config.model.served_model_name in ("paced", "told"):
            time.sleep(STEP_TIME_S)
        self._tell(self._worker.execute(step))

    def _is_late(self, step: SchedulerOutput) -> bool:
        for new in step.new_requests:
            self._late_rows.pop(new.row, None)
            if new.request_id.startswith("late-"):
                self._late_rows[new.row] = 0
        for row in self._late_rows.keys() & set(step.rows):
            self._late_rows[row] += 1
        return LATE_STEPS in self._late_rows.values()

    def reset_rows(self) -> None:
        self._late_rows.clear()
        self._worker.reset_rows()

    def receive(self) -> list[ExecutorEvent]:
        events, self._events = self._events, []
        if events:
            os.eventfd_read(self._wake_fd)
        return events

    def _tell(self, event: ExecutorEvent) -> None:
        self._events.append(event)
        os.eventfd_write(self._wake_fd, 1)

    def register(self, poller: zmq.Poller) -> None:
        poller.register(self._wake_fd, zmq.POLLIN)

    def stop(self, grace_s: float) -> None:
        """Nothing to end."""

    @property
    def pids(self) -> dict[str, int]:
        return {"worker": os.getpid()}


def _is_first_start(config: EngineConfig) -> bool:
    """True once for a `config.model.model`, the path of a file that says so afterwards."""
    mark = Path(config.model.model)
    is_first = not mark.exists()
    mark.touch()
    return is_first


def main() -> NoReturn:
    engine_process.make_executor = lambda config, _context, _address: FakeProcessExecutor(config)
    if SUPERVISOR_ROLE in sys.argv:
        patch_process()
        supervisor.CORE_MODULE = "fake_core"
        liveness.LISTEN_TIMEOUT_S = 3.0
        supervisor.run_supervisor()
    engine_process.main()


if __name__ == "__main__":
    main()
