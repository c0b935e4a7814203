"""run_scenario: plays a scenario and checks, after every turn and at the end, what must always hold.

Every request ends exactly once, with a cause that the scenario knows of; its tokens are those of an
undisturbed run, none lost or doubled; no block is lost; queues stay within bounds; and when nothing more goes
wrong, everything ends.
"""

from __future__ import annotations

import random
import tempfile
import traceback
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from ...core.clients.client_registry import GroupRoster
from ...core.faults.blame import FAILURES_ALONE
from ...core.faults.failures import ATTEMPTS_AT_FLOOR
from ...frontend.outputs import RequestOutput
from ...frontend.requests.beams import Hypothesis, begin_search
from ...frontend.requests.input_processor import EngineInput
from ...frontend.requests.vectors.outputs import PoolingOutput, PoolingRequestOutput
from ...frontend.requests.vectors.state import PoolingInput
from ...ipc.daemon.daemon_control import (
    AddEngine,
    CommandRefused,
    DrainEngine,
    RemoveEngine,
    RestartEngines,
    ResumeEngine,
)
from ...ipc.params.beam_search import BeamSearch
from ...ipc.params.pooling_params import PoolingParams
from ...ipc.params.sampling_params import RequestOutputKind
from ...ipc.protocol.messages import EngineCoreRequest
from .fake_vectors import expected_pooled
from .fake_worker import VOCAB_SIZE, expected_beams, expected_output, make_request
from .network import FIRST_MOMENT, Network, Timeline
from .scenario import COMMANDS, MAX_MODEL_LEN, Fault, FaultKind, Scenario, SimRequest
from .sim_client import SimClient
from .sim_core import SimCore
from .sim_daemon import KILLED, SimDaemon, SimPlace
from .sim_link import SimEngine
from .violation import Violation

Pooled = PoolingRequestOutput[PoolingOutput]

MAX_EVENTS = 20_000  # of a run; a usual one has some hundred
_MAX_REPLIES = 16  # that wait for one client beside its outputs
_EPSILON_S = 1e-6
_RESTART_TIMES_S = (0.01, 0.05, 0.2)
_LONGEST_START_S = 0.1  # of one that is killed meanwhile; one that hangs is noticed later
_GIVEN_UP_S = 0.5
_REMOVED_SHARE = 0.5  # of the added engines that do not get ready


@dataclass(slots=True)
class _Life:
    """What a user sees of a request."""

    plan: SimRequest
    client: SimClient
    request: EngineCoreRequest
    added_at: float
    expected: list[Hypothesis] = field(default_factory=list[Hypothesis])  # of a beam search
    tokens: list[int] = field(default_factory=list[int])
    final: RequestOutput | Pooled | None = None
    ended_at: float = 0.0


@dataclass(slots=True)
class Outcome:
    """What a run has met, for people: to see that it does what it is for."""

    num_events: int = 0
    num_turns: int = 0
    num_requests: int = 0
    num_tokens: int = 0
    num_core_crashes: int = 0  # accidents and poison
    ends: dict[str, int] = field(default_factory=dict[str, int])  # finish reason or error code -> requests


class _Run:
    def __init__(self, scenario: Scenario, folder: Path) -> None:
        """`folder`: for what a core leaves to the next one."""
        self._scenario = scenario
        self._config = scenario.make_config()
        self._rng = random.Random(scenario.rng_seed)
        self._timeline = Timeline()
        self._folder = folder
        self._places: dict[int, SimPlace] = {}
        self._new_starts: deque[str] = deque()  # how the first starts of added engines go
        self._daemon: SimDaemon | None = None  # of several engines
        self._lives: dict[str, _Life] = {}
        self._was_accepted: dict[str, bool] = {}
        self._num_accidents = 0  # most in one core's life, of those that no request is to blame for
        self._num_shortages = 0  # likewise
        self._num_core_accidents = 0  # cores that were lost by accident
        self._num_epochs = 0
        self._num_clients = 0
        self.outcome = Outcome()
        if scenario.num_engines > 1:
            self._daemon = SimDaemon(
                self._config.for_engine(0, scenario.num_engines),
                self._timeline,
                self._rng,
                self._find_place,
                self._make_core,
                folder,
            )
        else:
            self._start_core(self._find_place(0))
        self._clients = [self._make_client(number) for number in range(len(scenario.clients))]

    def play(self) -> None:
        """Let everything happen. Raises Violation."""
        for plan in self._scenario.requests:
            self._timeline.call_at(FIRST_MOMENT + plan.at, lambda plan=plan: self._add(plan))
            if plan.abort_at is not None:
                self._timeline.call_at(FIRST_MOMENT + plan.abort_at, lambda plan=plan: self._abort(plan))
        for fault in self._scenario.faults:
            self._timeline.call_at(FIRST_MOMENT + fault.at, lambda fault=fault: self._happen(fault))
        while self._timeline.run_next():
            self.outcome.num_events += 1
            if self.outcome.num_events > MAX_EVENTS:
                raise Violation(f"no end after {MAX_EVENTS} events; unfinished: {self._list_unfinished()}")
        self._check_end()

    # -- processes

    def _find_place(self, index: int) -> SimPlace:
        """The place of an engine, which is made when it is asked for first."""
        scenario = self._scenario
        if index not in self._places:
            network = Network(
                self._timeline,
                self._rng,
                scenario.delay_s,
                scenario.high_water_mark,
                scenario.repeat_share,
            )
            place = self._places[index] = SimPlace(network, str(self._folder / f"deaths{index or ''}.json"))
            if index >= scenario.num_engines:
                place.plans.append(self._new_starts.popleft())
        return self._places[index]

    def _start_core(self, place: SimPlace) -> None:
        place.core = self._make_core(place, None, "")

    def _make_core(self, place: SimPlace, group: GroupRoster | None, plan: str) -> SimCore:
        self._num_epochs += 1
        if plan in ("crash", "hang"):
            after_s = self._rng.uniform(0.0, _LONGEST_START_S) * (10.0 if plan == "hang" else 1.0)
            core_number = self._num_epochs
            self._timeline.call_at(
                self._timeline.now + after_s, lambda: self._end_start(place, f"epoch {core_number}")
            )
        return SimCore(
            f"epoch {self._num_epochs}",
            self._scenario,
            self._config,
            place.journal_path,
            self._was_accepted,
            place.network,
            self._timeline,
            self._rng,
            self._check_core,
            lambda: self._lose_core(place, self._rng.choice(_RESTART_TIMES_S)),
            lambda exit_code: place.end(exit_code),
            group,
            plan,
        )

    def _end_start(self, place: SimPlace, epoch: str) -> None:
        """A core that hangs is killed, as one that does not answer is, or its engine removed."""
        if place.core is None or place.core.epoch != epoch:
            return
        index = next(index for index, one in self._places.items() if one is place)
        if index >= self._scenario.num_engines and self._rng.random() < _REMOVED_SHARE:
            assert self._daemon is not None
            self._daemon.command(RemoveEngine(index))  # which may be refused
            self._timeline.call_at(self._timeline.now + _GIVEN_UP_S, lambda: self._end_start(place, epoch))
        else:
            place.end(KILLED)

    def _lose_core(self, place: SimPlace, lasts_s: float) -> None:
        if self._daemon is not None:
            self.outcome.num_core_crashes += place.core is not None
            place.end(KILLED)
        elif place.core is not None:
            place.core.crash()
            place.core = None
            self.outcome.num_core_crashes += 1
            self._timeline.call_at(self._timeline.now + lasts_s, lambda: self._start_core(place))

    def _make_client(self, number: int) -> SimClient:
        self._num_clients += 1
        client = SimClient(
            b"client %d" % self._num_clients,
            self._scenario.clients[number],
            [self._make_engine(index) for index in self._list_sockets()],
            self._timeline,
            self._rng,
        )
        return client

    def _list_sockets(self) -> list[int]:
        """The engines whose sockets a client finds."""
        if self._daemon is None:
            return [0]
        return [engine.state.index for engine in self._daemon.group.running]

    def _make_engine(self, index: int) -> SimEngine:
        place = self._find_place(index)
        engine = SimEngine(index, place.network, lambda: place.core, self._scenario.window_bytes)
        engine.siblings = self._make_engine
        return engine

    def _happen(self, fault: Fault) -> None:
        if fault.kind in COMMANDS:
            self._command(fault)
            return
        place = self._places.get(fault.engine)
        match fault.kind:
            case FaultKind.CORE_CRASH if place is not None:
                self._num_core_accidents += place.core is not None
                self._lose_core(place, fault.lasts_s)
            case FaultKind.WORKER_CRASH | FaultKind.STEP_FAILURE | FaultKind.SHORTAGE:
                if place is not None and place.core is not None:
                    self._harm_worker(place.core, fault.kind)
            case FaultKind.CLIENT_CRASH:
                self._clients[fault.client].crash()
                self._clients[fault.client] = self._make_client(fault.client)
            case FaultKind.CONNECTION_LOSS:
                self._clients[fault.client].lose_connection(fault.engine)
            case FaultKind.CLIENT_STOP:
                client = self._clients[fault.client]
                client.stopped_until = max(client.stopped_until, self._timeline.now + fault.lasts_s)
            case _:
                pass

    def _command(self, fault: Fault) -> None:
        """An operator wants something."""
        daemon, index = self._daemon, fault.engine
        if daemon is None:
            return
        match fault.kind:
            case FaultKind.DRAIN:
                daemon.command(DrainEngine(index))
                self._timeline.call_at(
                    self._timeline.now + fault.lasts_s, lambda: daemon.command(ResumeEngine(index))
                )
            case FaultKind.ADD:
                self._new_starts.append(fault.start)
                daemon.command(AddEngine())
            case FaultKind.REMOVE:
                self._num_core_accidents += 1  # of what it still has: none is to blame for its end
                daemon.command(RemoveEngine(index))
            case _:
                self._num_core_accidents += 1
                if index in self._places:
                    self._places[index].plans.append(fault.start)
                daemon.command(RestartEngines(index))

    def _harm_worker(self, core: SimCore, kind: FaultKind) -> None:
        core.harm_worker(kind)
        self._num_accidents = max(self._num_accidents, core.num_accidents)
        self._num_shortages = max(self._num_shortages, core.num_shortages)

    # -- users

    def _add(self, plan: SimRequest) -> None:
        client = self._clients[plan.client]

        def make() -> EngineInput | PoolingInput:
            request = make_request(
                plan.name,
                list(plan.prompt),
                arrival_time=self._timeline.now,
                priority=plan.priority,
                tenant=plan.tenant,
                names=[plan.name],
                timeout_s=plan.timeout_s,
                queue_timeout_s=plan.queue_timeout_s,
                grammar=plan.grammar,
                max_tokens=plan.max_tokens,
                stop_token_ids=list(range(VOCAB_SIZE - plan.num_stops, VOCAB_SIZE)),
                output_kind=RequestOutputKind.DELTA,
                eos_token_ids=[] if plan.beam_width is None else list(range(plan.num_stops)),
                pooling_params=None if plan.pooling is None else PoolingParams(task=plan.pooling),
            )
            self._lives[plan.name] = _Life(plan, client, request, self._timeline.now)
            self.outcome.num_requests += 1
            if plan.pooling is not None:
                return PoolingInput(plan.name, list(plan.prompt), [request])
            search, first = None, request
            if plan.beam_width is not None:
                search, first = begin_search(request, BeamSearch(plan.beam_width), MAX_MODEL_LEN)
            params, prompt, now = request.sampling_params, list(plan.prompt), self._timeline.now
            made = EngineInput(plan.name, None, prompt, params, now, [first], beam_search=search)
            self._lives[plan.name].expected = [] if search is None else expected_beams(made)
            return made

        client.add(make, self._take_output)

    def _abort(self, plan: SimRequest) -> None:
        life = self._lives.get(plan.name)
        if life is None:
            return
        if plan.priority:  # which has no bearing on aborts, and so chooses between the two ways
            life.client.abort(plan.name)
        else:
            self._clients[(plan.client + 1) % len(self._clients)].abort_named(plan.name)

    def _take_output(self, output: RequestOutput | Pooled) -> None:
        life = self._lives[output.request_id]
        _require(life.final is None, f"{output.request_id} goes on after its end")
        if isinstance(output, PoolingRequestOutput):
            life.final, life.ended_at = output, self._timeline.now
            return
        if output.finished:
            life.final, life.ended_at = output, self._timeline.now
        if life.plan.beam_width is not None:
            _require(output.finished, f"{output.request_id} has an output before its end")
            return
        life.tokens += output.outputs[0].token_ids
        expected, _ = expected_output(life.request, MAX_MODEL_LEN)
        _require(
            life.tokens == expected[: len(life.tokens)],
            f"{output.request_id} has {life.tokens}, its golden tokens are {expected}",
        )

    # -- what must hold

    def _check_core(self, sim: SimCore) -> None:
        self.outcome.num_turns += 1
        core = sim.core
        if core is None:
            return
        problems = core.check_integrity()
        _require(not problems, f"integrity: {problems}")
        num_owed = sum(life.plan.beam_width or 1 for life in self._lives.values())
        _require(core.num_unfinished <= num_owed, f"{core.num_unfinished} requests live in the core")
        stall = core.stats().stall
        _require(stall is None, f"it gets no token though the device is free: {stall}")
        for client in sim.registry.clients.values():
            num_unsent = client.outbox.num_unsent
            _require(num_unsent <= num_owed + _MAX_REPLIES, f"{num_unsent} wait for one client")
        for client in self._clients:
            _require(
                client.num_resumable == client.num_owed,
                f"a ledger has {client.num_resumable} requests, its user waits for {client.num_owed}",
            )
            client.check()

    def _check_end(self) -> None:
        unfinished = self._list_unfinished()
        _require(not unfinished, f"nothing more happens, and these have not ended: {unfinished}")
        if self._daemon is None:
            self._check_end_of(self._places[0].core)
        else:
            self._check_daemon(self._daemon)
        for life in self._lives.values():
            self.outcome.num_tokens += len(life.tokens)
            if life.final is not None:
                end = self._check_final(life, life.final)
                self.outcome.ends[end] = self.outcome.ends.get(end, 0) + 1

    def _check_daemon(self, daemon: SimDaemon) -> None:
        _require(not daemon.num_open_commands, f"only these were answered: {list(daemon.answers)}")
        for engine in daemon.group.running:
            _require(engine.is_open, f"engine {engine.state.index} is {engine.state.state}")
            self._check_end_of(self._places[engine.state.index].core)
        for sender, answer in daemon.answers.items():
            if isinstance(answer, CommandRefused) and "AddEngine" in sender:
                causes = ("model='missing'", "was killed", "no memory just now", "was removed")
                _require(any(cause in answer.reason for cause in causes), f"{sender}: {answer.reason}")

    def _check_end_of(self, sim: SimCore | None) -> None:
        core = None if sim is None else sim.core
        _require(core is not None, "the core has not come back")
        assert sim is not None
        assert core is not None
        gone = set(sim.registry.clients) - {sim.owner, *(client.identity for client in self._clients)}
        _require(not gone, f"the core still knows {sorted(gone)}")
        _require(core.num_unfinished == 0, f"the core keeps {core.num_unfinished} requests for nobody")
        _require(core.stats().kv_blocks_used == 0, f"{core.stats().kv_blocks_used} blocks are still in use")

    def _list_unfinished(self) -> list[str]:
        return [name for name, life in self._lives.items() if life.final is None and not life.client.is_dead]

    def _check_final(self, life: _Life, final: RequestOutput | Pooled) -> str:
        """What it ended with; raises Violation if it should not have."""
        plan = life.plan
        if isinstance(final, PoolingRequestOutput):
            reason = final.finish_reason
        else:
            reason = final.outputs[0].finish_reason
        lasted_s = life.ended_at - life.added_at + _EPSILON_S
        end = str(final.error_code if reason == "error" else reason)
        match end:
            case "stop" if isinstance(final, PoolingRequestOutput):
                expected_vectors = expected_pooled(life.request, self._config.model.spec)
                is_right = plan.poison is None and final.outputs.raw == expected_vectors
            case "stop" | "length" if isinstance(final, RequestOutput):
                expected = expected_output(life.request, MAX_MODEL_LEN)
                is_right = (life.tokens, reason) == (expected[0], str(expected[1]))
                num_tokens = len(life.tokens)
                if plan.beam_width is not None:
                    is_right = _has_beams(final, life.expected)
                    num_tokens = max(len(one.token_ids) for one in final.outputs)
                hangs_late = plan.poison == "hang" and plan.poison_from > 0  # counted anew in each row
                is_right = is_right and (plan.poison is None or num_tokens <= plan.poison_from or hangs_late)
            case "abort":
                timed_out = plan.timeout_s is not None and lasted_s >= plan.timeout_s
                is_right = plan.abort_at is not None or timed_out
            case "poison_request":
                is_right = self._may_be_convicted(plan, str(final.error))
            case "out_of_memory":
                is_right = plan.poison == "memory" or self._num_shortages >= ATTEMPTS_AT_FLOOR
            case "bad_logits" | "bad_vector":
                is_right = plan.poison == "logits" and (end == "bad_vector") == (plan.pooling is not None)
            case "bad_grammar":
                is_right = plan.poison == "grammar"
            case "overloaded":
                is_right = not self._was_accepted[plan.name]
            case "queue_timeout":
                is_right = plan.queue_timeout_s is not None and lasted_s >= plan.queue_timeout_s
            case _:
                is_right = False
        _require(is_right, f"{plan.name} ended with {end} ({final.error}) and {len(life.tokens)} tokens")
        return end

    def _may_be_convicted(self, plan: SimRequest, error: str) -> bool:
        """Only the culprit, unless what nobody is to blame for happened to one request again and again."""
        if "engine cores died" in error:
            return plan.poison == "core" or self._num_core_accidents >= FAILURES_ALONE
        return plan.poison in ("step", "death", "hang") or self._num_accidents >= FAILURES_ALONE


def run_scenario(scenario: Scenario) -> Outcome:
    """Play it. Raises Violation, also for an exception in the code that is under test."""
    with tempfile.TemporaryDirectory() as folder:
        run = _Run(scenario, Path(folder))
        try:
            run.play()
        except Violation:
            raise
        except Exception as error:
            raise Violation(traceback.format_exc()) from error
    return run.outcome


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise Violation(problem)


def _has_beams(final: RequestOutput, expected: list[Hypothesis]) -> bool:
    beams = [(one.token_ids, one.beam_score, one.finish_reason) for one in final.outputs]
    return beams == [(one.beam.token_ids.tolist(), one.score, str(one.finish_reason)) for one in expected]
