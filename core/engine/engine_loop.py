"""EngineLoop: what an engine does in a turn, in which order, and what follows when something fails.

The core's process, the in-process engine and the simulator run it: each brings messages, clocks and an
executor, and has its own way to wait between turns. It knows no socket.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from ...ipc.errors import USER_ERRORS, CaptureError, FilesChangedError, ProtocolError
from ...ipc.processes.due import find_earliest
from ...ipc.processes.fault_hooks import make_fault_hooks
from ...ipc.processes.own_sources import check_own_sources
from ...ipc.processes.process import EXIT_CRASHED, EXIT_OK, EXIT_START_FAILED, EXIT_WORKER_LOST
from ...ipc.processes.process_limits import describe_address_space
from ...ipc.protocol.codec import find_request_id, make_client_codec
from ...ipc.protocol.messages import ProtocolNotice
from ...ipc.protocol.request_price import find_max_frame_bytes
from ...ipc.protocol.step import ModelRunnerOutput, StepFailed, WorkerFailed, WorkerProgress, WorkerReady
from ...ipc.spec.config import EngineConfig
from ..clients.client_registry import ClientRegistry
from ..faults.blame import WorkerDeath
from ..faults.death_journal import DeathJournal
from ..stats.engine_facts import StartupClock, format_level, format_phases, format_startup, make_engine_facts
from ..workers.executor import Executor, ExecutorEvent, WorkerLost
from .engine_core import EngineCore

_log = logging.getLogger(__name__)

MAX_RECEIVE_S = 0.005  # of a turn goes to clients' messages; the others wait for the next turn

Messages = Iterable[tuple[bytes, Sequence[bytes]]]  # (client, frames)


@dataclass(frozen=True, slots=True)
class EngineEnd:
    """Why the loop has ended. `exit_code` is for the core's process."""

    exit_code: int
    reason: str
    kind: str = ""  # the error's class, if the start has failed


class EngineLoop:
    """One engine from its start to its `end`. `start` comes first, then `run_turn` until `end` is set."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        registry: ClientRegistry,
        startup: StartupClock,
        journal_path: str = "",
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        hash_seed: bytes | None = None,
    ) -> None:
        """`startup` has run since the engine began to start. The clocks and `hash_seed` are for EngineCore,
        `journal_path` is for DeathJournal.
        """
        self.codec = make_client_codec(find_max_frame_bytes(config.model.max_model_len))
        self.end: EngineEnd | None = None
        self._config = config
        self._executor = executor
        self._registry = registry
        self._startup = startup
        self._journal = DeathJournal(journal_path)
        self._clock = clock
        self._monotonic = monotonic
        self._hash_seed = hash_seed
        self._faults = make_fault_hooks(config.fault_hooks, "core")
        self._worker_budget = config.recovery.make_worker_budget()
        self._has_worker = False

    def start(self) -> None:
        """Begin to start the worker."""
        self._note_phase("start worker", self._clock())
        self._start_worker()
        self._take_events()

    def run_turn(self, messages: Messages = ()) -> None:
        """Take what has arrived, submit steps, deliver outputs. Messages that remain are for later turns."""
        # 1. Clients before results: a request that is aborted needs no further token.
        self.take_messages(messages)
        self._registry.leases.check_if_due(self._registry.check_leases)
        self._take_events()
        # 2. Steps before outputs: the worker would idle while clients are answered.
        core = self._registry.core
        if core is not None:
            core.expire(self._monotonic())
            if self._has_worker:
                self._submit_steps(core)
        # 3. Outputs and answers.
        self._registry.deliver()
        if core is not None:
            _log_requests(core)

    @property
    def next_turn_at(self) -> float | None:
        """When a turn is due although nothing arrives, by the monotonic clock; None if never."""
        core = self._registry.core
        at = find_earliest(self._registry.next_turn_at, self._executor.next_check_at)
        return at if core is None else find_earliest(at, core.next_deadline(), core.next_schedule_at())

    def take_messages(self, messages: Messages) -> None:
        """Take messages for at most MAX_RECEIVE_S; a bad one is answered with a ProtocolNotice."""
        ends_at = self._monotonic() + MAX_RECEIVE_S
        for identity, frames in messages:
            self._take_message(identity, frames)
            if self._monotonic() >= ends_at:
                return

    def _take_message(self, identity: bytes, frames: Sequence[bytes]) -> None:
        try:
            message = self.codec.decode(frames)
        except ProtocolError as error:
            self._registry.reply(identity, ProtocolNotice(str(error), find_request_id(frames)))
            return
        try:
            self._registry.take(identity, message)
        except ProtocolError as error:  # the message is valid, and comes at a wrong time
            self._registry.reply(identity, ProtocolNotice(str(error)))

    def finish(self, exit_code: int, reason: str, kind: str = "") -> None:
        """End the loop; no further step is submitted."""
        if exit_code == EXIT_OK:
            self._journal.note_alone(None)
        self._has_worker = False
        self.end = EngineEnd(exit_code, reason, kind)

    # -- steps

    def _submit_steps(self, core: EngineCore) -> None:
        if core.blame.take_reset():
            self._executor.reset_rows()
        self._executor.expect_tests(core.blame.is_searching)
        while core.num_in_flight < self._config.scheduler.max_steps_in_flight:
            if self._faults is not None:
                self._faults.reach("core.schedule")
            self._journal.note_alone(core.blame.alone)  # before the step, which may kill this core
            step = core.schedule()
            if step is None:
                return
            self._executor.submit(step)

    def _take_events(self) -> None:
        for event in self._executor.receive():
            self._on_event(event)

    def _on_event(self, event: ExecutorEvent) -> None:
        match event:
            case ModelRunnerOutput():
                assert self._registry.core is not None
                self._registry.core.update(event)
            case StepFailed():
                assert self._registry.core is not None
                _fail_step(self._registry.core, event)
            case WorkerProgress():
                self._note_phase(event.phase, event.at)
            case WorkerReady():
                self._on_worker_ready(event)
            case WorkerFailed():
                self._on_worker_failed(event)
            case WorkerLost():
                self._on_worker_lost(event)

    # -- the worker

    def _start_worker(self) -> None:
        """Start a worker; the engine ends if Quire's sources have changed since this process started."""
        try:
            self._executor.start()
        except FilesChangedError as error:
            self.finish(EXIT_START_FAILED, str(error), type(error).__name__)

    def _note_phase(self, phase: str, at: float) -> None:
        self._startup.begin(phase, at)
        if self._faults is not None:
            self._faults.reach("core.start")
        self._registry.note_phase(phase)

    def _on_worker_ready(self, ready: WorkerReady) -> None:
        try:
            check_own_sources()  # the worker may have read some while they were being replaced
        except FilesChangedError as error:
            self.finish(EXIT_START_FAILED, str(error), type(error).__name__)
            return
        self._has_worker = True
        pids = {"core": os.getpid(), **self._executor.pids}
        if self._registry.core is not None:
            self._resume_with(ready, self._registry.core, pids)
            return
        num_blocks, num_deaths = ready.num_gpu_blocks, self._journal.num_deaths
        num_slots = ready.num_state_slots
        self._executor.configure(self._config.for_next_worker(num_blocks, num_slots))
        clock, monotonic = self._clock, self._monotonic
        core = EngineCore(
            self._config, num_blocks, clock, self._hash_seed, monotonic, num_deaths, num_state_slots=num_slots
        )
        facts = make_engine_facts(self._config, ready, pids, self._startup)
        for line in format_startup(facts):
            _log.info("%s", line)
        self._registry.open(core, facts)

    def _resume_with(self, ready: WorkerReady, core: EngineCore, pids: dict[str, int]) -> None:
        """Go on with a worker that replaces a lost one."""
        facts = self._registry.facts
        assert facts is not None
        if ready.batch_variance_reason != facts.batch_variance_reason:  # e.g. the compiler was removed
            level = format_level(ready.batch_variance_reason)
            _log.error("the restarted worker computes in another way: %s from now on", level)
        self._registry.facts = msgspec.structs.replace(
            facts, pids=pids, batch_variance_reason=ready.batch_variance_reason
        )
        stats = core.stats()
        if ready.num_gpu_blocks < stats.kv_blocks_total or ready.num_state_slots < stats.state_slots_total:
            self._journal.note_alone(None)
            reason = "the restarted worker has room for fewer KV blocks or states than before; starting anew"
            _log.error("%s", reason)
            self.finish(EXIT_CRASHED, reason)  # the next core can work with fewer
        self._registry.note_worker(True)
        _log.info("another worker is %s", format_phases(self._startup.measure()))

    def _on_worker_failed(self, failed: WorkerFailed) -> None:
        """End the engine if this is its first worker or the model is at fault, else start another worker."""
        _log.debug("worker start failed\n%s", failed.details)
        if failed.kind == CaptureError.__name__ and self._go_without_graphs():
            _log.warning("%s; starting another worker, whose steps run without", failed.reason)
            self._start_worker()
            return
        if self._registry.core is None or failed.kind in USER_ERRORS:
            self.finish(EXIT_START_FAILED, failed.reason, failed.kind)
        else:
            what = "did not start again" if not self._has_worker else "cannot go on"
            self._on_worker_lost(WorkerLost(f"the worker {what}: {failed.reason}"))

    def _go_without_graphs(self) -> bool:
        """Have workers capture no graphs from now on; False if they capture none or cannot be configured."""
        if self._config.model.enforce_eager:
            return False
        config = self._config.without_graphs()
        core = self._registry.core
        worker_config = config
        if core is not None:
            stats = core.stats()
            worker_config = config.for_next_worker(stats.kv_blocks_total, stats.state_slots_total)
        if not self._executor.configure(worker_config):
            return False
        self._config = config
        return True

    def _on_worker_lost(self, lost: WorkerLost) -> None:
        """Start another worker, which computes every running request again; end after too many losses."""
        core = self._registry.core
        if core is None:
            reason = f"the engine did not start: {lost.reason}{describe_address_space()}"
            self.finish(EXIT_START_FAILED, reason, "EngineStartError")
            return
        now, budget = self._monotonic(), self._worker_budget
        death = core.failures.lose_worker(
            lost.reason, is_overdue=lost.is_overdue, is_last_allowed=budget.is_spent_by_next(now)
        )
        if death is WorkerDeath.CONVICTED:
            budget.forgive()
        elif death is WorkerDeath.UNEXPLAINED and budget.note_loss(now) is None:
            self.finish(EXIT_WORKER_LOST, f"{lost.reason}, {budget.excess}")
            return
        _log.error("%s; starting another", lost.reason)
        self._has_worker = False
        self._registry.note_worker(False)
        self._startup = StartupClock("start worker", self._clock())
        self._start_worker()


def _fail_step(core: EngineCore, failed: StepFailed) -> None:
    if not core.failures.fail_step(failed):
        return
    _log.error("step %d failed: %s\n%s", failed.step_id, failed.error, failed.details)
    if failed.is_out_of_memory:
        max_tokens, max_rows = core.failures.step_limits
        _log.warning("steps have at most %d tokens and %d requests for a while", max_tokens, max_rows)


def _log_requests(core: EngineCore) -> None:
    for report in core.failures.take_poison_reports():
        _log.error("poison request %s", msgspec.json.encode(report).decode())
    for line in core.request_log.take():
        _log.info("%s", line)
