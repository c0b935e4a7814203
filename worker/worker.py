"""Worker: one device from its start to its steps. It puts the parts together and knows no sockets.

The start is a sequence of phases, each announced as it begins; the core times them.
"""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch

from ..ipc.errors import ConfigError
from ..ipc.files.file_identity import check_loaded
from ..ipc.processes.cpu_cores import find_engine_cores, list_cores
from ..ipc.protocol.step import ModelRunnerOutput, SchedulerOutput, StepFailed, WorkerReady
from ..ipc.spec.config import EngineConfig, ParallelConfig
from ..kernels.group.shared_group import SharedGroup
from ..kernels.program import native
from ..kernels.triton.direct_launch import launch_directly
from ..kernels.triton.triton_runtime import CompileWatch, can_use_triton
from .devices import is_out_of_memory, is_sticky, resolve_device
from .kv_cache import (
    allocate_kv_caches,
    allocate_states,
    check_max_model_len,
    check_weights_fit,
    plan_memory,
    wait_for_memory,
)
from .models import load_model
from .models.model import Model
from .rank import check_num_ranks, compute_weights_id, join_group, take_cores
from .sampling.logits_processor import load_logits_processors
from .steps.model_runner import GPUModelRunner, LaunchedStep
from .steps.rank_runners import make_runner
from .steps.warm_up import WarmUp, compile_kernels, run_all
from .threads import ThreadRule, count_cores
from .torch_import import load_meta_kernels

_log = logging.getLogger(__name__)


class Worker:
    """Owns a device: its model, KV cache and runner. `start` comes once, before everything else."""

    def __init__(
        self,
        config: EngineConfig,
        on_phase: Callable[[str], None],
        rank: int = 0,
        group_path: str = "",
    ) -> None:
        """`group_path`: the file of the ranks that share the model; '': this worker has all of it."""
        self._config = config
        self._on_phase = on_phase
        self._rank, self._group_path = rank, group_path
        self._group: SharedGroup | None = None
        self._has_stages = config.parallel.pipeline_parallel_size > 1
        self._runner: GPUModelRunner | None = None
        self._threads: ThreadRule | None = None

    def start(self) -> WorkerReady:
        """Take the device, load the model, allocate the KV cache and run a step of each kind once.

        Raises ModelError for a model that cannot be loaded, ConfigError for one that does not fit the device.
        """
        self._on_phase("set up device")
        device, num_threads = self._set_up_device()
        config = self._config.for_stage(self._rank // self._config.parallel.tensor_parallel_size)
        part = config.for_rank()
        num_ranks = self._config.parallel.num_ranks
        with _fitted_before(part):
            if part.num_blocks_before is not None:
                wait_for_memory(part, device, num_ranks)
            check_max_model_len(part, device)
            check_weights_fit(part, device, config.parallel.tensor_parallel_size)
        if device.type != "cpu" or config.logits_processors or config.model.load_format == "dummy":
            load_meta_kernels()
        processors = load_logits_processors(config.logits_processors, config.logits_processor_folders)
        self._on_phase("load weights")
        is_cut = self._group is not None and self._group.size > 1
        files = config.model.noted, config.model.model, config.model.tokenizer
        check_loaded(*files)
        model = _load_model(config, device, self._group if is_cut else None)
        check_loaded(*files)  # again: they may have been replaced meanwhile
        if device.type == "cpu":
            num_active_params = part.model.spec.num_active_params
            self._threads = ThreadRule(num_threads, model.weight_bytes, num_active_params)
        if config.exact and model.batch_variance_reason:
            raise ConfigError("exact", True, f"not here, since {model.batch_variance_reason}")
        self._on_phase("allocate KV cache")
        with _fitted_before(part):
            plan = plan_memory(part, device, model.weight_bytes, num_ranks)
        kv_caches = allocate_kv_caches(part, plan.num_blocks, device)
        link = self._group if self._has_stages else None
        states = allocate_states(part, plan.num_state_slots, device)
        self._runner = make_runner(part, model, kv_caches, device, self._group, link, states)
        self._on_phase("warm up")
        watch = self._warm_up(plan.num_blocks, device)
        if watch is not None:
            launch_directly()
        if self._runner.has_graphs:
            self._on_phase("capture graphs")
            self._runner.capture_graphs()
        if watch is not None:
            watch.is_serving = True
        if processors:  # after the warm-up, whose requests they must not see
            self._runner.use_logits_processors(processors)
        weights_id = "" if self._group is None else compute_weights_id(self._config)
        backends = "+".join(dict.fromkeys(backend.name for backend in model.attention_backends))
        if device.type == "cuda":
            _log.info("attention is computed by %s", backends)
        variance = model.batch_variance_reason
        return WorkerReady(
            plan.num_blocks,
            str(device),
            plan.ledger,
            variance,
            weights_id,
            backends,
            plan.num_state_slots,
        )

    def _set_up_device(self) -> tuple[torch.device, int | None]:
        """The device, and the number of threads; None: by model and cores."""
        check_switch()
        parallel = self._config.parallel
        device = resolve_device(
            parallel.device, parallel.data_parallel_rank * parallel.num_ranks + self._rank
        )
        check_num_ranks(parallel, device)
        if device.type == "cpu":
            _take_engine_share(parallel)
        torch.set_grad_enabled(False)
        num_threads = parallel.num_threads
        if self._group_path:
            num_threads = self._meet_group(device)
        native.set_num_threads(num_threads or count_cores())
        return device, num_threads

    def _meet_group(self, device: torch.device) -> int:
        """Join the other ranks and bind to this one's cores. Returns its number of threads."""
        self._group = join_group(self._group_path, self._rank, self._config, device)
        parallel = self._config.parallel
        return parallel.num_threads or take_cores(self._rank, parallel.num_ranks)

    @property
    def is_async(self) -> bool:
        """Whether a step may be launched before the one ahead of it is collected (on a GPU)."""
        assert self._runner is not None
        return self._runner.is_async

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Execute one step. After an exception the rows are undefined until `reset_rows`."""
        return self.collect(self.launch(step))

    def launch(self, step: SchedulerOutput) -> LaunchedStep:
        """Queue a step's work on the device. After an exception as `execute`."""
        assert self._runner is not None
        if self._threads is not None:
            num_threads = self._threads.choose(sum(step.num_tokens))
            if num_threads != torch.get_num_threads():
                native.set_num_threads(num_threads)
        launched = self._runner.launch(step)
        if self._group is not None:
            self._group.note_step()
        return launched

    def collect(self, launched: LaunchedStep) -> ModelRunnerOutput:
        """Wait for the oldest launched step's tokens. After an exception as `execute`."""
        assert self._runner is not None
        return self._runner.collect(launched)

    def describe_failure(self, step_id: int, error: Exception) -> StepFailed:
        """The answer to a step that raised; called while `error` is handled."""
        return StepFailed(
            step_id,
            f"{type(error).__name__}: {error}",
            traceback.format_exc(),
            is_out_of_memory(error),
        )

    def is_lost(self, error: Exception) -> bool:
        """Whether this process can compute nothing more after a step's error."""
        return is_sticky(error)

    def abort_group(self, error: Exception) -> None:
        """Tell the other ranks, if there are any, that this one needs `reset_rows` to go on."""
        if self._group is not None:
            self._group.abort(f"{type(error).__name__}: {error}", is_out_of_memory(error))

    def reset_rows(self) -> None:
        """Forget every request, and free the memory that a failed step has left.

        Waits for the other ranks to do the same. Raises GroupLost if one of them has ended.
        """
        assert self._runner is not None
        if self._group is not None:
            self._group.reset()
        self._runner.reset_rows()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def _warm_up(self, num_blocks: int, device: torch.device) -> CompileWatch | None:
        """Run steps of all kinds, so that no request pays for a first call."""
        warm_up = WarmUp(self._config, num_blocks)
        if not can_use_triton(device):
            run_all(warm_up.make_brief_runs(), self.execute, self.reset_rows)
            return None
        return compile_kernels(warm_up, self._config, device, self.execute, self.reset_rows)


def _load_model(config: EngineConfig, device: torch.device, group: SharedGroup | None) -> Model:
    """Of layers here, or of transformers' code, which no other worker imports."""
    if config.model.spec.generic is None:
        return load_model(config, device, group)
    from .models.generic.load import load_generic

    return load_generic(config, device)


@contextmanager
def _fitted_before(config: EngineConfig) -> Generator[None]:
    """Turn ConfigErrors into MemoryErrors for a worker that replaces a lost one, which had enough memory: a
    shortage is then not the user's error, and passes.
    """
    try:
        yield
    except ConfigError as error:
        if config.num_blocks_before is None:
            raise
        raise MemoryError(str(error)) from error


def check_switch() -> None:
    """Raise ConfigError if QUIRE_NATIVE_KERNELS has a bad value."""
    try:
        native.is_switched_off()
    except ValueError as error:
        raise ConfigError(native.SWITCH, os.environ[native.SWITCH], native.SWITCH_ALLOWED) from error


def _take_engine_share(parallel: ParallelConfig) -> None:
    """Bind this process to its engine's part of the cores, unless num_threads was chosen."""
    if parallel.data_parallel_size > 1 and parallel.num_threads is None:
        cores = find_engine_cores(list_cores(), parallel.data_parallel_rank, parallel.data_parallel_size)
        os.sched_setaffinity(0, [core.processor for core in cores])
