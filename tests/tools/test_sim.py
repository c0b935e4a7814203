"""The simulator: seeds hold, replay and shrink; and it fails when what it watches over is broken."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import pytest
from quire.core.clients.client_registry import ClientRegistry
from quire.core.clients.clients import LeaseWatch
from quire.core.engine.engine_core import EngineCore, NamedAborts
from quire.core.engine.engine_loop import EngineLoop
from quire.core.faults.blame import FAILURES_ALONE, Blame
from quire.core.faults.death_journal import DeathJournal
from quire.core.faults.failures import StepLimits
from quire.core.kv.kv_cache_manager import KVCacheManager
from quire.core.scheduling.deadlines import Deadlines
from quire.core.scheduling.scheduler import Scheduler
from quire.core.scheduling.step_times import StepTimes
from quire.core.scheduling.work_turns import WorkTurns
from quire.core.supervision.group_commands import GroupCommands
from quire.core.supervision.supervised_engine import SupervisedEngine
from quire.core.workers.executor import WorkerLost
from quire.frontend.client.engine_connection import EngineConnection
from quire.frontend.client.engine_group import EngineGroup
from quire.frontend.client.engine_links import EngineLinks
from quire.frontend.client.engine_router import EngineRouter
from quire.frontend.requests.output_processor import RequestState
from quire.ipc.errors import EngineStartError
from quire.ipc.processes.due import find_earliest
from quire.ipc.protocol.client_protocol import ClientProtocol
from quire.ipc.protocol.messages import SUSPECT_ATTEMPTS, EngineCoreOutput, EngineCoreRequest, Welcome
from quire.ipc.protocol.request_ledger import LedgerEntry, RequestLedger
from quire.ipc.protocol.send_window import SendWindow
from quire.ipc.protocol.step import SchedulerOutput
from quire.tools.sim.run import Outcome, run_scenario
from quire.tools.sim.scenario import (
    COMMANDS,
    FaultKind,
    PoisonKind,
    Scenario,
    draw_group_scenario,
    draw_scenario,
)
from quire.tools.sim.sim_link import SimLink
from quire.tools.sim.simulate import describe_failure, find_violation, shrink, simulate
from quire.tools.sim.violation import Violation

NUM_SEEDS = 100
NUM_GROUP_SEEDS = 30


def test_many_seeds_hold(capsys: pytest.CaptureFixture[str]) -> None:
    code = simulate(range(NUM_SEEDS))
    out = capsys.readouterr().out
    assert code == 0, out
    assert f"{NUM_SEEDS:,} seeds" in out
    # Every end that a request can have is met, or the scenarios have become harmless.
    ends = ("length", "stop", "abort", "poison_request", "bad_logits", "bad_grammar", "out_of_memory")
    assert [end for end in (*ends, "overloaded", "queue_timeout") if end not in out] == []


def test_many_seeds_with_several_engines_hold(capsys: pytest.CaptureFixture[str]) -> None:
    code = simulate(range(NUM_GROUP_SEEDS), has_groups=True)
    assert code == 0, capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_thousand_seeds_hold(capsys: pytest.CaptureFixture[str]) -> None:
    code = simulate(range(NUM_SEEDS, NUM_SEEDS + 10_000))
    assert code == 0, capsys.readouterr().out


def test_every_fault_is_drawn() -> None:
    kinds = Counter(fault.kind for seed in range(200) for fault in draw_group_scenario(seed).faults)
    assert set(kinds) == set(FaultKind)
    with_one = Counter(fault.kind for seed in range(200) for fault in draw_scenario(seed).faults)
    assert set(with_one) == set(FaultKind) - COMMANDS


def play_with_a_culprit(
    scenario: Scenario, poison: PoisonKind, **fields: Any
) -> tuple[Outcome, Counter[str]]:
    """What has been met, and how requests have ended, without accidents."""
    harmless = [
        replace(one, poison=None, abort_at=None, timeout_s=None, queue_timeout_s=None)
        for one in scenario.requests
    ]
    requests = (replace(harmless[0], poison=poison, poison_from=0, pooling=None, **fields), *harmless[1:])
    outcome = run_scenario(replace(scenario, requests=requests, faults=(), max_num_queued_reqs=None))
    return outcome, Counter(outcome.ends)


@pytest.mark.parametrize(
    ("poison", "end"),
    [
        *((poison, "poison_request") for poison in ("step", "death", "hang", "core")),
        ("logits", "bad_logits"),
        ("grammar", "bad_grammar"),
        ("memory", "out_of_memory"),
    ],
)
def test_without_accidents_exactly_the_culprit_fails(poison: PoisonKind, end: str) -> None:
    for seed in range(8):
        scenario = draw_scenario(seed)
        _, ends = play_with_a_culprit(scenario, poison)
        assert ends.pop(end) == 1, scenario.describe()
        assert ends["length"] + ends["stop"] == len(scenario.requests) - 1, scenario.describe()


@pytest.mark.parametrize("poison", ["core", "death", "step"])
def test_of_several_engines_the_culprit_fails_and_no_more_cores_are_lost_than_of_one(
    poison: PoisonKind,
) -> None:
    for seed in range(5):
        scenario = replace(draw_group_scenario(seed), num_engines=3)
        outcome, ends = play_with_a_culprit(scenario, poison, beam_width=None)
        assert ends.pop("poison_request") == 1, scenario.describe()
        assert ends["length"] + ends["stop"] == len(scenario.requests) - 1, scenario.describe()
        num_crashes = SUSPECT_ATTEMPTS + FAILURES_ALONE if poison == "core" else 0
        assert outcome.num_core_crashes == num_crashes, scenario.describe()


def test_several_that_hang_late_or_at_once_are_drawn_and_end() -> None:
    hangs: Counter[int] = Counter()
    num_late = 0
    ends: Counter[str] = Counter()
    for seed in range(100):
        scenario = draw_scenario(seed)
        culprits = [one for one in scenario.requests if one.poison == "hang"]
        if culprits:
            hangs[len(culprits)] += 1
            num_late += any(one.poison_from for one in culprits)
            ends.update(run_scenario(replace(scenario, faults=())).ends)
    assert set(hangs) == {1, 2, 3}
    assert 0 < num_late < sum(hangs.values()) < ends["poison_request"]


def test_a_seed_replays_in_another_process_with_other_hashes() -> None:
    seeds = range(8)
    script = (
        "from quire.tools.sim.run import run_scenario\n"
        "from quire.tools.sim.scenario import draw_scenario\n"
        f"print([repr(run_scenario(draw_scenario(seed))) for seed in {seeds!r}])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=os.environ | {"PYTHONHASHSEED": "1"},
    )
    assert done.stdout.strip() == str([repr(run_scenario(draw_scenario(seed))) for seed in seeds])


class Break(NamedTuple):
    """What is broken on purpose: `around`, which gets the method first, is called in that method's place.

    first: the seed at which to begin, where it was found before, so that the hundreds before need not run.
    suits: whether a scenario can show it at all; others are not played.
    """

    first: int
    kind: type[Any]
    name: str
    around: Callable[..., Any] | property
    is_of_groups: bool = False
    suits: Callable[[Scenario], bool] = lambda _: True

    def apply(self, patch: pytest.MonkeyPatch) -> None:
        around, method = self.around, getattr(self.kind, self.name)
        if isinstance(around, property):
            patch.setattr(self.kind, self.name, around)
        else:
            patch.setattr(self.kind, self.name, lambda *args, **named: around(method, *args, **named))


def open_by_any_welcome(take: Any, self: ClientProtocol, message: msgspec.Struct, now: float) -> None:
    if isinstance(message, Welcome):
        self._number = message.number
    take(self, message, now)


def send_unseen(_send: Any, self: EngineConnection, _now: float) -> None:
    while self.protocol.outbox and self._transport.send(self.protocol.outbox[0]):
        self.protocol.outbox.popleft()


def resume_as_new(resume: Any, *args: Any, **named: Any) -> list[object]:
    return [
        msgspec.structs.replace(one, is_resumed=False) if isinstance(one, EngineCoreRequest) else one
        for one in resume(*args, **named)
    ]


def forget(resume: Any, self: RequestLedger, now: float, is_other_engine: bool = False) -> list[object]:
    return [*resume(self, now, is_other_engine)] if is_other_engine else []


def take_twice(take: Any, self: RequestLedger, outputs: list[EngineCoreOutput]) -> list[EngineCoreOutput]:
    for output in outputs:
        if (entry := self._entries.get(output.request_id)) is not None:
            entry.output.extend(output.new_token_ids[: max(0, len(entry.output) - output.start)])
    return take(self, outputs)


def append(take: Any, self: RequestState, output: EngineCoreOutput, now: float) -> None:
    ends: dict[str, Any] = {"error": output.error, "error_code": output.error_code}
    tokens = (output.new_token_ids, output.finish_reason)
    take(self, EngineCoreOutput(output.request_id, len(self.token_ids), *tokens, **ends), now)


def keep_a_block(free: Any, self: KVCacheManager, request: Any) -> None:
    request.blocks[-1].ids[-1:] = []
    free(self, request)


def begin_at_once(note_progress: Any, self: Blame) -> None:
    if self._must_begin or self._has_cleared_group:
        self._preempt_all()
    note_progress(self)


def go_on_without_worker(on_worker_lost: Any, self: EngineLoop, lost: WorkerLost) -> None:
    on_worker_lost(self, lost)
    self._has_worker = True


def move_without_hello(move_all: Any, self: EngineGroup, now: float) -> None:
    with pytest.MonkeyPatch.context() as inner:
        inner.setattr(ClientProtocol, "connection_made", lambda _self, _now: None)
        move_all(self, now)


def keep_what_is_given_up(release: Any, self: RequestLedger, **named: Any) -> list[LedgerEntry]:
    entries = release(self, **named)
    self._entries |= {entry.request.request_id: entry for entry in entries}
    return entries


def place_elsewhere(place: Any, self: EngineRouter, request: EngineCoreRequest) -> int:
    index = place(self, request)
    return next(reversed(self._engines)) if request.request_id.endswith("1") else index


def end_with_a_failed_start(take: Any, self: EngineLinks[SimLink], link: SimLink, *args: Any) -> object:
    outputs = take(self, link, *args)
    if link.protocol.refusal is not None and link.protocol.facts is None:
        raise EngineStartError(link.protocol.refusal.reason)
    return outputs


def has_many_dear_rows(scenario: Scenario) -> bool:
    """Of requests that nothing ends early, so that some are in a step together once they are known."""
    lasting = [
        one for one in scenario.requests if one.max_tokens >= 8 and not one.pooling and not one.num_stops
    ]
    return scenario.capacity is None and sum(one.work_us >= 9000 for one in lasting) >= 4


def is_far(scenario: Scenario) -> bool:
    return scenario.window_bytes is not None


def do_nothing(*_: object) -> None:
    pass


BREAKS = {
    "nobody remembers which request was alone when a core died": Break(
        60, DeathJournal, "note_alone", do_nothing
    ),
    "a suspect runs while the worker still does a step of another": Break(
        178, Blame, "note_progress", begin_at_once
    ),
    "who is in a step that is too large fails at once": Break(1, StepLimits, "shrink", lambda *_: False),
    "the worker is not told that its rows are void": Break(1, Blame, "take_reset", lambda *_: False),
    "steps are submitted between a worker's death and the next": Break(
        9, EngineLoop, "_on_worker_lost", go_on_without_worker
    ),
    "nobody looks who has gone when a connection ends": Break(1, LeaseWatch, "note_disconnect", do_nothing),
    "what did not fit into a client's queue waits for the next message": Break(
        2, ClientRegistry, "next_turn_at", property(lambda self: self.leases.next_check_at)
    ),
    "a Welcome of an earlier connection opens the protocol": Break(
        1091, ClientProtocol, "_take_while_closed", open_by_any_welcome
    ),
    "a client sends before it has looked at its connection": Break(
        2212, EngineConnection, "send_waiting", send_unseen
    ),
    "requests that an engine took on are added to the next as new": Break(
        3483, RequestLedger, "resume", resume_as_new
    ),
    "an engine that dropped a client is not told of its requests again": Break(
        19, RequestLedger, "resume", forget
    ),
    "the ledger takes tokens that it has once more": Break(136, RequestLedger, "take", take_twice),
    "what is read is appended, wherever it starts": Break(0, RequestState, "take", append),
    "a request that ends keeps its last block": Break(0, KVCacheManager, "free", keep_a_block),
    "rows whose tokens take long are in every step": Break(
        0, WorkTurns, "limit", lambda _limit, _self, _step, decodes: decodes, suits=has_many_dear_rows
    ),
    "chunks beside streams go by tokens alone": Break(
        0, StepTimes, "find_prompt_s", lambda *_: None, suits=lambda scenario: scenario.token_s > 0
    ),
    "an abort has no effect": Break(0, EngineCore, "abort_requests", do_nothing),
    "who was on the way when it was aborted goes on": Break(0, NamedAborts, "cover", lambda *_: False),
    "a request goes on when its time is over": Break(17, Deadlines, "pop_due", do_nothing),
    "a core sleeps when a request's time is over": Break(17, EngineCore, "next_deadline", do_nothing),
    "a client of the network sends without end": Break(
        0, SendWindow, "is_full", property(lambda _: False), suits=is_far
    ),
    "a client of the network takes no answer for its PING's": Break(
        0, SendWindow, "note_answer", do_nothing, suits=is_far
    ),
    "a supervisor that waits for a core to be empty never sleeps": Break(
        30,
        SupervisedEngine,
        "next_check_at",
        property(
            lambda self: find_earliest(self._core.next_check_at, self._drain and self._drain.next_look_at)
        ),
        True,
    ),
    "a draining engine keeps what its clients have moved away": Break(
        956, EngineGroup, "_move_all", move_without_hello, True
    ),
    "a client takes the failed start of an engine for its own end": Break(
        0, EngineLinks, "take", end_with_a_failed_start, True
    ),
    "who adds an engine is not told that it was removed": Break(
        19, GroupCommands, "_check_known", do_nothing, True
    ),
    "what is given up to another engine stays in the ledger": Break(
        3, RequestLedger, "release", keep_what_is_given_up, True
    ),
    "nobody notes where a moved request is now": Break(0, EngineRouter, "place", place_elsewhere, True),
}


def find_failing_seed(
    first: int,
    draw: Callable[[int], Scenario] = draw_scenario,
    suits: Callable[[Scenario], bool] = lambda _: True,
) -> tuple[int, Violation]:
    """The seed and what is wrong with it."""
    for seed in range(first, first + 5000):
        scenario = draw(seed)
        if suits(scenario) and (violation := find_violation(scenario)) is not None:
            return seed, violation
    raise AssertionError("5,000 seeds hold although something is broken")


@pytest.mark.parametrize("name", BREAKS)
def test_what_is_broken_on_purpose_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = BREAKS[name]
    broken.apply(monkeypatch)
    seed, violation = find_failing_seed(
        broken.first, draw_group_scenario if broken.is_of_groups else draw_scenario, broken.suits
    )
    print(f"{name}: seed {seed}: {violation}")


def test_a_lost_connections_welcome_that_opens_the_protocol_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next connection does not close it again."""

    def connection_lost(lost: Any, self: ClientProtocol, now: float) -> None:
        lost(self, now)
        self._number -= 1

    def connection_made(made: Any, self: ClientProtocol, now: float) -> None:
        was_open = self.is_open
        self._number += 1
        made(self, now)
        self.is_open = was_open

    for around in (connection_lost, connection_made):
        Break(0, ClientProtocol, around.__name__, around).apply(monkeypatch)
    find_failing_seed(0)


def test_an_idle_engine_that_forms_no_step_now_and_then_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = itertools.count()

    def schedule(schedule: Any, self: Scheduler) -> SchedulerOutput | None:
        return None if not self.in_flight and next(numbers) % 5 == 0 else schedule(self)

    Break(0, Scheduler, "schedule", schedule).apply(monkeypatch)
    find_failing_seed(0)


def test_a_failing_seed_is_shrunk_and_printed_with_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    BREAKS["what is read is appended, wherever it starts"].apply(monkeypatch)
    seed, _ = find_failing_seed(0)
    scenario = draw_scenario(seed)
    small = shrink(scenario)
    assert find_violation(small) is not None
    assert len(small.requests) <= 3
    assert len(small.requests) + len(small.faults) < len(scenario.requests) + len(scenario.faults)
    text = describe_failure(seed)
    assert f"rng_seed={scenario.rng_seed}" in text
    assert small.describe() in text
    assert f"--first {seed} --seeds 1" in text
