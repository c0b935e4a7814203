"""SimCore: one life of the engine core's process, around the real ClientRegistry and EngineCore.

It does what `EngineCoreProcess._turn` does, on the simulated network and clock, with a FakeWorker that takes
its time, has little memory and dies of poison, or takes the core with it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping

import msgspec

from ...core.client_registry import ClientRegistry
from ...core.death_journal import DeathJournal
from ...core.engine_core import EngineCore
from ...core.engine_facts import StartupClock, make_engine_facts
from ...ipc.codec import make_client_codec
from ...ipc.config import EngineConfig
from ...ipc.errors import ProtocolError
from ...ipc.messages import EngineCoreRequest, ProtocolNotice
from ...ipc.step import ModelRunnerOutput, SchedulerOutput, StepFailed, WorkerReady
from .fake_worker import FakeExecutor, FakeWorker
from .network import Network, Timeline
from .scenario import Scenario, SimRequest

_WORKER_START_S = 0.1
_LONGEST_STEP_S = 0.01
_LONGEST_TURN_S = 0.001


class WorkerDied(Exception):
    """A step has ended its worker."""


class CoreDied(Exception):
    """A step has ended the engine core."""


class PoisonedWorker(FakeWorker):
    """A FakeWorker for which some requests are poison, and some steps too large."""

    poisons: Mapping[str, SimRequest]
    capacity: int | None
    is_short: bool = False  # of memory for the next step, however small

    def find_failure(self, step: SchedulerOutput) -> StepFailed | None:
        num_tokens = sum(step.num_tokens)
        if self.is_short or (self.capacity is not None and num_tokens > self.capacity):
            self.is_short = False
            return _run_short(step, f"{num_tokens} tokens are too many")
        for number in step.rows:
            row = self.rows[number]
            request = self.poisons.get(row.request_id)
            num_output = len(row.tokens) - row.num_prompt_tokens
            if request is None or num_output < request.poison_from:
                continue
            match request.poison:
                case "death":
                    raise WorkerDied(row.request_id)
                case "core":
                    raise CoreDied(row.request_id)
                case "step":
                    return StepFailed(step.step_id, f"poisoned by {row.request_id}")
                case "memory":
                    return _run_short(step, f"{row.request_id} is too large")
                case _:
                    self.bad.add(row.request_id)
        return None


def _run_short(step: SchedulerOutput, cause: str) -> StepFailed:
    return StepFailed(step.step_id, cause, is_out_of_memory=True)


class SimCore:
    """A core that starts now; `crash` ends it."""

    def __init__(
        self,
        epoch: str,
        scenario: Scenario,
        config: EngineConfig,
        journal_path: str,
        was_accepted: dict[str, bool],
        network: Network,
        timeline: Timeline,
        rng: random.Random,
        on_turn: Callable[[SimCore], None],
        on_poisoned: Callable[[], None],
    ) -> None:
        """`on_poisoned`: a request has killed this core, which the caller is to `crash`."""
        self._scenario = scenario
        self._config = config
        self._journal = DeathJournal(journal_path)
        self._was_accepted = was_accepted  # request -> whether the first core that got it took it on
        self._network = network
        self._timeline = timeline
        self._rng = rng
        self._on_turn = on_turn
        self._on_poisoned = on_poisoned
        self._codec = make_client_codec()
        self.registry = ClientRegistry(epoch, timeline(), self._send, timeline)
        self.is_dead = False
        self.num_accidents = 0  # steps and workers lost that no request is to blame for
        self.num_shortages = 0  # of memory, likewise
        self._worker: PoisonedWorker | None = None
        self._executor: FakeExecutor | None = None
        self._is_worker_known = False  # the core counts on it; it may be dead already
        self._inbox: deque[tuple[bytes, tuple[bytes, ...]]] = deque()
        self._answers: deque[ModelRunnerOutput | StepFailed | str] = deque()  # a text: the worker was lost
        self._turn_at: float | None = None
        self.registry.note_phase("start worker")
        self._start_worker()

    @property
    def core(self) -> EngineCore | None:
        """None until the worker was ready for the first time."""
        return self.registry.core

    # -- the network's side

    def receive(self, identity: bytes, frames: tuple[bytes, ...]) -> None:
        """A message has arrived at the ROUTER."""
        self._inbox.append((identity, frames))
        self._wake()

    def note_disconnect(self) -> None:
        """The ROUTER's monitor says that a connection has ended."""
        self.registry.note_disconnect()
        self._wake()

    # -- faults

    def crash(self) -> None:
        """End at once, with the worker."""
        self.is_dead = True
        self._executor = self._worker = None
        self._network.lose_all()

    def crash_worker(self) -> None:
        """The worker ends with all that it was doing."""
        if self._executor is not None:
            self.num_accidents += 1
            self._lose_worker("the worker was killed")

    def fail_next_step(self) -> None:
        """Let the next step that the worker runs raise."""
        if self._worker is not None:
            self.num_accidents += 1
            self._worker.fail_next = "injected"

    def starve_next_step(self) -> None:
        """Let the next step that the worker runs be too large for the memory."""
        if self._worker is not None:
            self.num_shortages += 1
            self._worker.is_short = True

    def _lose_worker(self, reason: str) -> None:
        """The core learns of it a little later."""
        self._executor = self._worker = None

        def note() -> None:
            self._answers.append(reason)
            self._wake()

        self._timeline.call_at(self._timeline.now + self._rng.uniform(0.0, 0.02), note)

    # -- a turn

    def _wake(self) -> None:
        self._turn_by(self._timeline.now + self._rng.uniform(0.0, _LONGEST_TURN_S))

    def _turn_by(self, at: float) -> None:
        at = max(at, self._timeline.now)
        if not self.is_dead and (self._turn_at is None or at < self._turn_at):
            self._turn_at = at
            self._timeline.call_at(at, lambda: self._turn_if_due(at))

    def _turn_if_due(self, at: float) -> None:
        if self._turn_at == at and not self.is_dead:
            self._turn_at = None
            self._turn()

    def _turn(self) -> None:
        # 1. Clients, leases, the worker's answers, deadlines.
        while self._inbox:
            self._take_message(*self._inbox.popleft())
        self.registry.check_leases_if_due()
        while self._answers:
            self._take_answer(self._answers.popleft())
        core = self.core
        if core is not None:
            core.expire(self._timeline.now)
        # 2. Feed the worker, deliver.
        if core is not None and self._is_worker_known:
            self._submit_steps(core)
        self.registry.deliver()
        self._on_turn(self)
        # 3. When there is something to do though nothing arrives.
        times = [self.registry.next_turn_at]
        if core is not None:
            times += [core.next_deadline(), core.next_schedule_at()]
        if (at := min((at for at in times if at is not None), default=None)) is not None:
            self._turn_by(at)

    def _take_message(self, identity: bytes, frames: tuple[bytes, ...]) -> None:
        message = self._codec.decode(frames)
        num_before = 0 if self.core is None else self.core.num_unfinished
        try:
            self.registry.take(identity, message)
        except ProtocolError as error:
            self.registry.reply(identity, ProtocolNotice(str(error)))
            return
        if isinstance(message, EngineCoreRequest) and self.core is not None:
            self._was_accepted.setdefault(message.request_id, self.core.num_unfinished > num_before)

    def _send(self, identity: bytes, message: msgspec.Struct) -> bool:
        return self._network.send_down(identity, self._codec.encode(message))

    # -- the worker

    def _start_worker(self) -> None:
        def on_ready() -> None:
            if self.is_dead:
                return
            worker = self._worker = PoisonedWorker(self._config, self._scenario.num_blocks)
            worker.poisons, worker.capacity = self._scenario.poisons, self._scenario.capacity
            self._executor = FakeExecutor(worker)
            self._is_worker_known = True
            if self.core is None:
                self._open()
            self._wake()

        self._timeline.call_at(self._timeline.now + self._rng.uniform(0.0, _WORKER_START_S), on_ready)

    def _open(self) -> None:
        ready = WorkerReady(self._scenario.num_blocks, "fake", [])
        clock = self._timeline
        facts = make_engine_facts(self._config, ready, {}, StartupClock("start", clock()))
        core = EngineCore(
            self._config, ready.num_gpu_blocks, clock, b"simulated", clock, self._journal.num_deaths
        )
        self.registry.open(core, facts)

    def _submit_steps(self, core: EngineCore) -> None:
        if core.failures.take_reset() and self._executor is not None:
            self._executor.reset_rows()
        while core.num_in_flight < self._config.scheduler.run_ahead:
            self._journal.note_alone(core.failures.alone)
            step = core.schedule()
            if step is None:
                return
            if self._executor is not None:  # what is sent to a dead one is lost with it
                self._executor.submit(step)
                if len(self._executor.pending) == 1:
                    self._run_step(self._executor)

    def _run_step(self, executor: FakeExecutor) -> None:
        def finish() -> None:
            if self._executor is not executor:
                return
            try:
                self._answers.append(executor.collect())
            except WorkerDied as died:
                self._lose_worker(f"the worker died of {died}")
                return
            except CoreDied:
                self._on_poisoned()
                return
            self._wake()
            if executor.pending:
                self._run_step(executor)

        self._timeline.call_at(self._timeline.now + self._rng.uniform(0.0, _LONGEST_STEP_S), finish)

    def _take_answer(self, answer: ModelRunnerOutput | StepFailed | str) -> None:
        core = self.core
        assert core is not None, "a worker answers only what a core has asked"
        match answer:
            case ModelRunnerOutput():
                core.update(answer)
            case StepFailed():
                core.failures.fail_step(answer)
            case str():
                core.failures.lose_worker(answer)
                self._is_worker_known = False
                self._start_worker()
