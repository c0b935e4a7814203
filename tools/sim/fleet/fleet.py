"""Fleet: engines with the real EngineCore, frontends with the real EngineRouter, on simulated time.

A step takes what was measured for its number of tokens (step_costs.py), a message takes NETWORK_S. What
frontends do with the router is what EngineGroup does; the time that it takes here, in reality, is counted
beside. Losses and drains come evenly spread; what an engine had goes on elsewhere.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from ....core.engine.engine_core import EngineCore
from ....frontend.client.engine_group import DIGEST_INTERVAL_S
from ....frontend.client.engine_router import EngineRouter
from ....ipc.protocol.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from ....ipc.protocol.prefix_digest import EngineDigest
from ....ipc.protocol.step import ModelRunnerOutput, SchedulerOutput
from ....ipc.protocol.token_ids import encode_token_ids
from ....ipc.spec.config import EngineConfig, SchedulerConfig
from ..fake_worker import FakeWorker, expected_output, make_config, make_request
from ..network import FIRST_MOMENT, Timeline
from .step_costs import StepCosts
from .traffic import PREFIX_TOKENS, PREFIXES_PER_ENGINE, Arrival

BLOCK_SIZE = 16
MAX_MODEL_LEN = 2048
NETWORK_S = 0.0003  # a message between two machines of one room
NOTICE_S = 0.005  # until a frontend sees that an engine's connections have ended
DRAIN_S = 1.0  # that a drained engine stays so
# Room for the prefixes of an engine's share, and a quarter of that for what runs.
NUM_BLOCKS = PREFIXES_PER_ENGINE * PREFIX_TOKENS // BLOCK_SIZE * 5 // 4


class Router(Protocol):
    """What a frontend asks where a request is to go: EngineRouter, or what it is compared with."""

    def add_engine(self, index: int) -> None: ...
    def set_takes_new(self, index: int, takes_new: bool) -> None: ...
    def place(self, request: EngineCoreRequest) -> int: ...
    def remove(self, request_id: str) -> None: ...
    def note_output(self, request_id: str) -> None: ...
    def take_digest(self, index: int, digest: EngineDigest) -> None: ...


class RoundRobin:
    """The next engine that takes requests."""

    def __init__(self, start: int) -> None:
        self._able: dict[int, bool] = {}
        self._next = start

    def add_engine(self, index: int) -> None:
        """As all of these, EngineRouter's."""
        self._able[index] = True

    def set_takes_new(self, index: int, takes_new: bool) -> None:
        """Likewise."""
        self._able[index] = takes_new

    def place(self, request: EngineCoreRequest) -> int:
        """The next one's index."""
        del request
        while True:
            self._next = (self._next + 1) % len(self._able)
            if self._able[self._next]:
                return self._next

    def remove(self, request_id: str) -> None:
        """Nothing is counted."""

    def note_output(self, request_id: str) -> None:
        """Likewise."""

    def take_digest(self, index: int, digest: EngineDigest) -> None:
        """Likewise."""


@dataclass(slots=True)
class Life:
    """What a user sees of a request."""

    request: EngineCoreRequest
    added_at: float
    engine: int = -1
    tokens: list[int] = field(default_factory=list[int])
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_moves: int = 0
    first_at: float | None = None
    ended_at: float | None = None
    longest_silence_s: float = 0.0
    heard_at: float = 0.0


class SimEngine:
    """One engine: a core, and a worker whose steps take their time."""

    def __init__(self, fleet: Fleet, index: int) -> None:
        self.index = index
        self.is_lost = False
        self.busy_s = 0.0
        self.num_steps = 0
        self.num_tokens = 0  # computed: of prompts and generated
        self._fleet = fleet
        self._pending: deque[SchedulerOutput] = deque()
        self._wake_at: float | None = None
        self._begin()

    def _begin(self) -> None:
        fleet = self._fleet
        self.core = EngineCore(fleet.config, NUM_BLOCKS, fleet.timeline, b"fleet", fleet.timeline)
        self._worker = FakeWorker(fleet.config, NUM_BLOCKS, verify=False)
        self._pending.clear()

    def add(self, frontend: bytes, request: EngineCoreRequest) -> None:
        """A request arrives; at an engine that is lost nothing does."""
        if not self.is_lost:
            self.core.add_request(frontend, request)
            self.pump()

    def remove_client(self, frontend: bytes) -> None:
        """A frontend begins anew: what it had here is dropped."""
        if not self.is_lost:
            self.core.remove_client(frontend)
            self.pump()

    def lose(self) -> None:
        """Everything is gone; another is there after a while."""
        self.is_lost = True
        self._begin()

    def restart(self) -> None:
        """Another is there, with an empty cache."""
        self.is_lost = False

    def pump(self) -> None:
        """Keep the worker fed, and say what there is."""
        core = self.core
        while core.num_in_flight < self._fleet.config.scheduler.max_steps_in_flight:
            step = core.schedule()
            if step is None:
                break
            self._pending.append(step)
            if len(self._pending) == 1:
                self._run(step)
        for frontend, outputs in core.take_outputs().items():
            self._fleet.deliver(frontend, self.index, outputs)
        wake_at = core.next_schedule_at()
        if wake_at is not None and wake_at != self._wake_at:
            self._wake_at = wake_at
            self._fleet.timeline.call_at(wake_at, self._wake)

    def _wake(self) -> None:
        self._wake_at = None
        if not self.is_lost:
            self.pump()

    def _run(self, step: SchedulerOutput) -> None:
        num_tokens = sum(step.num_tokens)
        took_s = self._fleet.costs.find(num_tokens)
        self.busy_s += took_s
        self.num_steps += 1
        self.num_tokens += num_tokens
        core = self.core
        self._fleet.timeline.call_at(self._fleet.timeline.now + took_s, lambda: self._finish(core))

    def _finish(self, core: EngineCore) -> None:
        if core is not self.core:  # of a life that was lost
            return
        output = self._worker.execute(self._pending.popleft())
        assert isinstance(output, ModelRunnerOutput), output
        core.update(output)
        if self._pending:
            self._run(self._pending[0])
        self.pump()


class SimFrontend:
    """Places requests, and moves those of engines that are lost or drained."""

    def __init__(self, fleet: Fleet, identity: bytes, router: Router) -> None:
        self.identity = identity
        self.router = router
        # What each took of this machine's time, in reality: to place a request, to take a digest in.
        self.place_times: list[float] = []
        self.digest_times: list[float] = []
        self._fleet = fleet
        self._lives: dict[str, Life] = {}
        self._digest_at = FIRST_MOMENT
        for engine in fleet.engines:
            router.add_engine(engine.index)

    def add(self, life: Life) -> None:
        """A user's request."""
        self._lives[life.request.request_id] = life
        self._place(life)
        if self._fleet.timeline.now >= self._digest_at:
            self._digest_at = self._fleet.timeline.now + DIGEST_INTERVAL_S
            self._take_digests()

    def receive(self, engine: int, outputs: Sequence[EngineCoreOutput]) -> None:
        """What an engine has sent; of requests that were moved away nothing counts."""
        now = self._fleet.timeline.now
        for output in outputs:
            life = self._lives.get(output.request_id)
            if life is None or life.engine != engine:
                continue
            if output.finish_reason is None:
                self.router.note_output(output.request_id)
            else:
                self.router.remove(output.request_id)
            self._fleet.note_output(life, output, now)
            if output.finish_reason is not None:
                del self._lives[output.request_id]

    def withdraw(self, index: int) -> None:
        """The engine is lost, or drains: nothing goes there, and what is there goes on elsewhere, at once."""
        self.router.set_takes_new(index, False)
        self._fleet.send(index, lambda engine: engine.remove_client(self.identity))
        for life in [life for life in self._lives.values() if life.engine == index]:
            life.num_moves += 1
            life.request = msgspec.structs.replace(
                life.request, output_token_ids=encode_token_ids(life.tokens), is_resumed=True
            )
            self.router.remove(life.request.request_id)
            self._place(life)

    def come_back(self, index: int, *, was_lost: bool) -> None:
        """It takes requests again."""
        if was_lost:
            self.router.add_engine(index)
        self.router.set_takes_new(index, True)

    def _place(self, life: Life) -> None:
        began = time.perf_counter()
        life.engine = self.router.place(life.request)
        self.place_times.append(time.perf_counter() - began)
        request = life.request
        self._fleet.send(life.engine, lambda engine: engine.add(self.identity, request))

    def _take_digests(self) -> None:
        for engine in self._fleet.engines:
            if not engine.is_lost:
                digest = engine.core.digests.make()
                began = time.perf_counter()
                self.router.take_digest(engine.index, digest)
                self.digest_times.append(time.perf_counter() - began)


class Fleet:
    """`num_engines` engines and some frontends, until every request has ended."""

    def __init__(self, num_engines: int, num_frontends: int, costs: StepCosts, *, has_router: bool) -> None:
        self.timeline = Timeline()
        self.costs = costs
        self.config = _make_config()
        self.lives: list[Life] = []
        self.wrong: list[str] = []  # what should not be: a request lost, a token wrong
        self.engines = [SimEngine(self, index) for index in range(num_engines)]
        self._rng = random.Random(num_engines)
        self.frontends = [
            SimFrontend(
                self, b"f%d" % number, _make_router(number * num_engines // num_frontends, has_router)
            )
            for number in range(num_frontends)
        ]
        self._by_identity = {frontend.identity: frontend for frontend in self.frontends}

    def play(self, arrivals: Sequence[Arrival], duration_s: float, num_losses: int, num_drains: int) -> None:
        """Let everything happen, until nothing is left."""
        for number, arrival in enumerate(arrivals):
            self.timeline.call_at(FIRST_MOMENT + arrival.at, lambda a=arrival, n=number: self._arrive(n, a))
        events = [self._lose] * num_losses + [self._drain] * num_drains
        self._rng.shuffle(events)
        victims = self._rng.sample(range(len(self.engines)), len(events))
        for number, (event, index) in enumerate(zip(events, victims, strict=True), 1):
            at = FIRST_MOMENT + duration_s * number / (len(events) + 1)
            self.timeline.call_at(at, lambda event=event, index=index: event(index))
        while self.timeline.run_next():
            pass
        self.wrong += [f"{one.request.request_id} has no end" for one in self.lives if one.ended_at is None]

    def send(self, index: int, action: _Action) -> None:
        """A message to an engine."""
        engine = self.engines[index]
        self.timeline.call_at(self.timeline.now + NETWORK_S, lambda: action(engine))

    def deliver(self, frontend: bytes, index: int, outputs: list[EngineCoreOutput]) -> None:
        """A message to a frontend."""
        to = self._by_identity[frontend]
        self.timeline.call_at(self.timeline.now + NETWORK_S, lambda: to.receive(index, outputs))

    def note_output(self, life: Life, output: EngineCoreOutput, now: float) -> None:
        """New tokens of a request, each once, and its end."""
        fresh = output.new_token_ids[len(life.tokens) - output.start :]
        if output.start > len(life.tokens):
            self.wrong.append(f"{output.request_id} has a gap at {len(life.tokens)}")
        if fresh:
            life.first_at = life.first_at or now
            life.longest_silence_s = max(life.longest_silence_s, now - (life.heard_at or now))
            life.heard_at = now
        life.tokens += fresh
        if output.num_cached_tokens is not None and not life.num_moves:
            life.num_cached_tokens = output.num_cached_tokens
        if output.finish_reason is not None:
            life.ended_at = now
            undisturbed = msgspec.structs.replace(life.request, output_token_ids=b"")
            if output.finish_reason is not FinishReason.LENGTH:
                self.wrong.append(f"{output.request_id} ended with {output.finish_reason}: {output.error}")
            elif life.tokens != expected_output(undisturbed, MAX_MODEL_LEN)[0]:
                self.wrong.append(f"{output.request_id} has other tokens than alone")

    def _arrive(self, number: int, arrival: Arrival) -> None:
        request = make_request(
            f"r{number}", arrival.prompt, max_tokens=arrival.max_tokens, arrival_time=self.timeline.now
        )
        life = Life(request, self.timeline.now, num_prompt_tokens=len(arrival.prompt))
        self.lives.append(life)
        self.frontends[number % len(self.frontends)].add(life)

    def _lose(self, index: int) -> None:
        now, engine = self.timeline.now, self.engines[index]
        engine.lose()
        self._tell(now + NOTICE_S, lambda frontend: frontend.withdraw(index))
        back_at = now + self.costs.ready_s
        self.timeline.call_at(back_at, engine.restart)
        self._tell(back_at, lambda frontend: frontend.come_back(index, was_lost=True))

    def _drain(self, index: int) -> None:
        now = self.timeline.now
        self._tell(now + NETWORK_S, lambda frontend: frontend.withdraw(index))
        self._tell(now + DRAIN_S, lambda frontend: frontend.come_back(index, was_lost=False))

    def _tell(self, at: float, action: _FrontendAction) -> None:
        for frontend in self.frontends:
            self.timeline.call_at(at, lambda frontend=frontend: action(frontend))


class _Action(Protocol):
    def __call__(self, engine: SimEngine, /) -> None: ...


class _FrontendAction(Protocol):
    def __call__(self, frontend: SimFrontend, /) -> None: ...


def _make_router(start: int, has_router: bool) -> Router:
    return EngineRouter(BLOCK_SIZE, start=start, num_blocks=NUM_BLOCKS) if has_router else RoundRobin(start)


def _make_config() -> EngineConfig:
    return make_config(max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE, scheduler=SchedulerConfig())
