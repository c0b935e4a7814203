"""`python -m fake_process ROLE`: real processes of all roles, around a Worker without torch.

The worker's loop, its fault hooks and its spares are the real ones. What a step computes is FakeWorker's: a
token is a hash of prompt and position, and what a row reads of the KV cache must be what belongs there.
Such a worker starts in a fifth of a real one's processor time.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType

from forked import patch_process
from quire.ipc.daemon.daemon_state import SUPERVISOR_ROLE
from quire.ipc.files.file_identity import check_loaded
from quire.ipc.processes.fault_hooks import make_fault_hooks
from quire.ipc.protocol.step import ModelRunnerOutput, SchedulerOutput, StepFailed, WorkerReady
from quire.ipc.spec.config import EngineConfig

MODULE = "fake_process"
NUM_BLOCKS = 1024
STEP_S = 0.001  # of which nobody's processor is used
STEP_S_BY_NAME = {"slow": 0.02}  # of models that are served under this name; "varies" is exact at first
_PHASES = ("set up device", "load weights", "allocate KV cache", "warm up")


@dataclass
class LaunchedStep:
    """A step that is computed already."""

    step_id: int
    result: ModelRunnerOutput
    is_done: bool = field(default=True, init=False)


class Worker:
    """What `quire.worker.worker.Worker` is to its process."""

    is_async = False

    def __init__(
        self, config: EngineConfig, on_phase: Callable[[str], None], rank: int = 0, group_path: str = ""
    ) -> None:
        from fakes import FakeWorker

        del group_path
        self._config, self._on_phase, self._rank = config, on_phase, rank
        self._num_blocks = config.cache.num_gpu_blocks_override or NUM_BLOCKS
        self._worker = FakeWorker(config, self._num_blocks)
        self._step_s = STEP_S_BY_NAME.get(config.model.served_model_name, STEP_S)
        self._faults = make_fault_hooks(config.fault_hooks, "worker", rank)

    def start(self) -> WorkerReady:
        for phase in _PHASES:
            self._on_phase(phase)
            check_loaded(self._config.model.noted, self._config.model.model, self._config.model.tokenizer)
        is_first = self._config.num_blocks_before is None
        is_exact = is_first or self._config.model.served_model_name != "varies"
        reason = "" if is_exact else "it varies"
        return WorkerReady(self._num_blocks, "fake", [("weights", 1)], reason)

    def launch(self, step: SchedulerOutput) -> LaunchedStep:
        time.sleep(self._step_s)
        if self._faults is not None and self._faults.reach("worker.logits"):
            self._worker.bad.add(self._worker.rows[step.rows[0]].request_id)
        result = self._worker.execute(step)
        assert isinstance(result, ModelRunnerOutput), result
        return LaunchedStep(step.step_id, result)

    def collect(self, launched: LaunchedStep) -> ModelRunnerOutput:
        return launched.result

    def describe_failure(self, step_id: int, error: Exception) -> StepFailed:
        text = f"{type(error).__name__}: {error}"
        return StepFailed(step_id, text, traceback.format_exc(), isinstance(error, MemoryError))

    def is_lost(self, error: Exception) -> bool:
        del error
        return False

    def abort_group(self, error: Exception) -> None:
        """There are no other ranks."""

    def reset_rows(self) -> None:
        self._worker.reset_rows()


def use_fake_worker() -> None:
    """Let this process's worker be the fake one."""
    from quire.worker import torch_import

    torch_import.import_torch = lambda: None
    module = ModuleType("quire.worker.worker")
    module.Worker = Worker  # pyright: ignore[reportAttributeAccessIssue]
    sys.modules[module.__name__] = module


def is_worker() -> bool:
    """Whether this process has a worker, or is to become one's."""
    return not {SUPERVISOR_ROLE, "engine-core"} & set(sys.argv)


def run(module: str) -> None:
    """The process of the role in argv; its children's module is `module`."""
    use_fake_worker()
    patch_process()
    if SUPERVISOR_ROLE in sys.argv:
        from quire.core.supervision import supervisor

        supervisor.CORE_MODULE = module
        supervisor.run_supervisor()
    elif "engine-core" in sys.argv:
        from quire.core.engine import engine_process
        from quire.core.workers import local_place

        local_place.WORKER_MODULE = module
        engine_process.main()
    else:
        from quire.worker import worker_process

        worker_process.main()


def main() -> None:
    run(MODULE)


if __name__ == "__main__":
    main()
