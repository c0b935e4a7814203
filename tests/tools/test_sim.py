"""The simulator: seeds hold, replay and shrink; and it fails when what it watches over is broken."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
from quire.core.clients.client_registry import ClientRegistry
from quire.core.clients.clients import LeaseWatch
from quire.core.engine.engine_loop import EngineLoop
from quire.core.faults.blame import FAILURES_ALONE, Blame
from quire.core.faults.death_journal import DeathJournal
from quire.core.faults.failures import StepLimits
from quire.core.kv.kv_cache_manager import KVCacheManager
from quire.core.scheduling.scheduler import Scheduler
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
from quire.ipc.protocol.step import SchedulerOutput
from quire.tools.sim.run import run_scenario
from quire.tools.sim.scenario import (
    COMMANDS,
    FaultKind,
    PoisonKind,
    Scenario,
    draw_group_scenario,
    draw_scenario,
)
from quire.tools.sim.shrink import find_violation, shrink
from quire.tools.sim.sim_link import SimLink, Violation
from quire.tools.sim.simulate import describe_failure, simulate

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


@pytest.mark.parametrize(
    ("poison", "end"),
    [
        ("step", "poison_request"),
        ("death", "poison_request"),
        ("hang", "poison_request"),
        ("core", "poison_request"),
        ("logits", "bad_logits"),
        ("grammar", "bad_grammar"),
        ("memory", "out_of_memory"),
    ],
)
def test_without_accidents_exactly_the_culprit_fails(poison: PoisonKind, end: str) -> None:
    for seed in range(8):
        scenario = draw_scenario(seed)
        harmless = [
            replace(one, poison=None, abort_at=None, timeout_s=None, queue_timeout_s=None)
            for one in scenario.requests
        ]
        culprit = replace(harmless[0], poison=poison, poison_from=0, pooling=None)
        requests = (culprit, *harmless[1:])
        scenario = replace(scenario, requests=requests, faults=(), max_num_queued_reqs=None)
        ends = Counter(run_scenario(scenario).ends)
        assert ends.pop(end) == 1, scenario.describe()
        assert ends["length"] + ends["stop"] == len(requests) - 1, scenario.describe()


@pytest.mark.parametrize("poison", ["core", "death", "step"])
def test_of_several_engines_the_culprit_fails_and_no_more_cores_are_lost_than_of_one(
    poison: PoisonKind,
) -> None:
    for seed in range(5):
        scenario = draw_group_scenario(seed)
        harmless = [
            replace(one, poison=None, abort_at=None, timeout_s=None, queue_timeout_s=None)
            for one in scenario.requests
        ]
        culprit = replace(harmless[0], poison=poison, poison_from=0, beam_width=None, pooling=None)
        requests = (culprit, *harmless[1:])
        scenario = replace(scenario, requests=requests, faults=(), max_num_queued_reqs=None, num_engines=3)
        outcome = run_scenario(scenario)
        ends = Counter(outcome.ends)
        assert ends.pop("poison_request") == 1, scenario.describe()
        assert ends["length"] + ends["stop"] == len(requests) - 1, scenario.describe()
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


# What is broken on purpose, one at a time.


def break_number_check(patch: pytest.MonkeyPatch) -> None:
    """A Welcome of an earlier connection opens the protocol."""
    original = ClientProtocol._take_while_closed

    def take(self: ClientProtocol, message: msgspec.Struct, now: float) -> None:
        if isinstance(message, Welcome):
            self._number = message.number
        original(self, message, now)

    patch.setattr(ClientProtocol, "_take_while_closed", take)


def break_loss_of_number(patch: pytest.MonkeyPatch) -> None:
    """A lost connection's Welcome opens the protocol, and the next connection does not close it again."""
    lost, made = ClientProtocol.connection_lost, ClientProtocol.connection_made

    def connection_lost(self: ClientProtocol, now: float) -> None:
        lost(self, now)
        self._number -= 1

    def connection_made(self: ClientProtocol, now: float) -> None:
        was_open = self.is_open
        self._number += 1
        made(self, now)
        self.is_open = was_open

    patch.setattr(ClientProtocol, "connection_lost", connection_lost)
    patch.setattr(ClientProtocol, "connection_made", connection_made)


def break_look_before_sending(patch: pytest.MonkeyPatch) -> None:
    """A client sends before it has looked whether its connection still stands."""

    def send_waiting(self: EngineConnection, _now: float) -> None:
        while self.protocol.outbox and self._transport.send(self.protocol.outbox[0]):
            self.protocol.outbox.popleft()

    patch.setattr(EngineConnection, "send_waiting", send_waiting)


def break_mark_of_resumed(patch: pytest.MonkeyPatch) -> None:
    """Requests that an engine has taken on are added to the next one as if they were new."""
    original = RequestLedger.resume

    def resume(self: RequestLedger, now: float, is_other_engine: bool = False) -> list[object]:
        messages = original(self, now, is_other_engine)
        return [
            msgspec.structs.replace(one, is_resumed=False) if isinstance(one, EngineCoreRequest) else one
            for one in messages
        ]

    patch.setattr(RequestLedger, "resume", resume)


def break_resumption(patch: pytest.MonkeyPatch) -> None:
    """An engine that has dropped this client is not told of its requests again."""
    original = RequestLedger.resume

    def resume(self: RequestLedger, now: float, is_other_engine: bool = False) -> list[object]:
        messages = original(self, now, is_other_engine)
        return [*messages] if is_other_engine else []

    patch.setattr(RequestLedger, "resume", resume)


def break_merge_in_ledger(patch: pytest.MonkeyPatch) -> None:
    """The ledger takes tokens that it has once more."""
    original = RequestLedger.take

    def take(self: RequestLedger, outputs: list[EngineCoreOutput]) -> list[EngineCoreOutput]:
        for output in outputs:
            if (entry := self._entries.get(output.request_id)) is not None:
                entry.output.extend(output.new_token_ids[: max(0, len(entry.output) - output.start)])
        return original(self, outputs)

    patch.setattr(RequestLedger, "take", take)


def break_merge_by_position(patch: pytest.MonkeyPatch) -> None:
    """What is read is appended, wherever it starts."""
    original = RequestState.take

    def take(self: RequestState, output: EngineCoreOutput, now: float) -> None:
        moved = EngineCoreOutput(
            output.request_id,
            len(self.token_ids),
            output.new_token_ids,
            output.finish_reason,
            error=output.error,
            error_code=output.error_code,
        )
        original(self, moved, now)

    patch.setattr(RequestState, "take", take)


def break_block_free(patch: pytest.MonkeyPatch) -> None:
    """A request that ends keeps its last block."""
    original = KVCacheManager.free

    def free(self: KVCacheManager, request: object) -> None:
        request.block_ids[-1:] = []  # pyright: ignore
        original(self, request)  # pyright: ignore

    patch.setattr(KVCacheManager, "free", free)


def break_progress(patch: pytest.MonkeyPatch) -> None:
    """Now and then an idle engine forms no step although a request waits."""
    original = Scheduler.schedule
    num_idle = 0

    def schedule(self: Scheduler) -> SchedulerOutput | None:
        nonlocal num_idle
        num_idle += not self.in_flight
        return None if not self.in_flight and num_idle % 5 == 0 else original(self)

    patch.setattr(Scheduler, "schedule", schedule)


def break_turns(patch: pytest.MonkeyPatch) -> None:
    """Rows whose tokens take long are in every step."""
    patch.setattr(WorkTurns, "limit", lambda _self, _step, decodes: decodes)


def break_journal(patch: pytest.MonkeyPatch) -> None:
    """Nobody remembers which request was alone when a core died."""
    patch.setattr(DeathJournal, "note_alone", lambda _self, _request_id: None)


def break_wait_of_search(patch: pytest.MonkeyPatch) -> None:
    """A suspect runs while the worker still does a step of another one."""
    original = Blame.note_progress

    def note_progress(self: Blame) -> None:
        if self._must_begin or self._has_cleared_group:
            self._preempt_all()
        original(self)

    patch.setattr(Blame, "note_progress", note_progress)


def break_reset_of_rows(patch: pytest.MonkeyPatch) -> None:
    """The worker is not told that its rows have become void."""
    patch.setattr(Blame, "take_reset", lambda _self: False)


def break_wait_for_worker(patch: pytest.MonkeyPatch) -> None:
    """Steps are submitted between a worker's death and the next one's start."""
    original = EngineLoop._on_worker_lost

    def on_worker_lost(self: EngineLoop, lost: WorkerLost) -> None:
        original(self, lost)
        self._has_worker = True

    patch.setattr(EngineLoop, "_on_worker_lost", on_worker_lost)


def break_leases(patch: pytest.MonkeyPatch) -> None:
    """Nobody looks who has gone when a connection ends."""
    patch.setattr(LeaseWatch, "note_disconnect", lambda _self: None)


def break_retry(patch: pytest.MonkeyPatch) -> None:
    """What did not fit into a client's queue waits for the next message."""
    patch.setattr(ClientRegistry, "next_turn_at", property(lambda self: self.leases.next_check_at))


def break_second_try(patch: pytest.MonkeyPatch) -> None:
    """Who is in a step that is too large fails at once."""
    patch.setattr(StepLimits, "shrink", lambda _self, _num_tokens, _num_rows: False)


def break_hello_of_a_drain(patch: pytest.MonkeyPatch) -> None:
    """A draining engine keeps what its clients have moved away."""
    original = EngineGroup._move_all

    def move_all(self: EngineGroup, now: float) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(ClientProtocol, "connection_made", lambda _self, _now: None)
            original(self, now)

    patch.setattr(EngineGroup, "_move_all", move_all)


def break_move_after_a_loss(patch: pytest.MonkeyPatch) -> None:
    """What is given up to another engine stays in the ledger of the lost one."""
    original = RequestLedger.release

    def release(self: RequestLedger, *, is_lost: bool, with_suspects: bool = True) -> list[LedgerEntry]:
        entries = original(self, is_lost=is_lost, with_suspects=with_suspects)
        self._entries |= {entry.request.request_id: entry for entry in entries}
        return entries

    patch.setattr(RequestLedger, "release", release)


def break_place_of_the_moved(patch: pytest.MonkeyPatch) -> None:
    """Nobody notes where a moved request is now."""
    original = EngineRouter.place

    def place(self: EngineRouter, request: EngineCoreRequest) -> int:
        index = original(self, request)
        return next(reversed(self._engines)) if request.request_id.endswith("1") else index

    patch.setattr(EngineRouter, "place", place)


def break_care_for_the_start(patch: pytest.MonkeyPatch) -> None:
    """A client takes the failed start of an engine for its own end."""
    original = EngineLinks.take

    def take(self: EngineLinks[SimLink], link: SimLink, frames: list[bytes], now: float) -> object:
        outputs = original(self, link, frames, now)
        if link.protocol.refusal is not None and link.protocol.facts is None:
            raise EngineStartError(link.protocol.refusal.reason)
        return outputs

    patch.setattr(EngineLinks, "take", take)


def break_removal_of_one_that_starts(patch: pytest.MonkeyPatch) -> None:
    """Who adds an engine is not told that it was removed before it was ready."""
    patch.setattr(GroupCommands, "_check_known", lambda _self, _engine: None)


def break_wait_of_a_drain(patch: pytest.MonkeyPatch) -> None:
    """A supervisor that waits for a core to start and then to be empty never sleeps."""
    patch.setattr(
        SupervisedEngine,
        "next_check_at",
        property(
            lambda self: find_earliest(self._core.next_check_at, self._drain and self._drain.next_look_at)
        ),
    )


GROUP_BREAKS = [
    (break_wait_of_a_drain, 30),
    (break_hello_of_a_drain, 956),
    (break_care_for_the_start, 0),
    (break_removal_of_one_that_starts, 19),
    (break_move_after_a_loss, 3),
    (break_place_of_the_moved, 0),
]

# Each with the seed at which to begin: where it was found before, so that the hundreds before need not run.
BREAKS = [
    (break_journal, 60),
    (break_wait_of_search, 178),
    (break_second_try, 1),
    (break_reset_of_rows, 1),
    (break_wait_for_worker, 9),
    (break_leases, 1),
    (break_retry, 2),
    (break_number_check, 1091),
    (break_loss_of_number, 0),
    (break_look_before_sending, 2212),
    (break_mark_of_resumed, 2244),
    (break_resumption, 19),
    (break_merge_in_ledger, 136),
    (break_merge_by_position, 0),
    (break_block_free, 0),
    (break_progress, 0),
    (break_turns, 602),
]


def find_failing_seed(first: int, draw: Callable[[int], Scenario] = draw_scenario) -> tuple[int, Violation]:
    """The seed and what is wrong with it."""
    for seed in range(first, first + 5000):
        if (violation := find_violation(draw(seed))) is not None:
            return seed, violation
    raise AssertionError("5,000 seeds hold although something is broken")


@pytest.mark.parametrize(("break_it", "first"), BREAKS)
def test_what_is_broken_on_purpose_is_found(
    break_it: Callable[[pytest.MonkeyPatch], None], first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)
    seed, violation = find_failing_seed(first)
    print(f"{break_it.__name__}: seed {seed}: {violation}")


@pytest.mark.parametrize(("break_it", "first"), GROUP_BREAKS)
def test_what_is_broken_in_a_group_is_found(
    break_it: Callable[[pytest.MonkeyPatch], None], first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)
    seed, violation = find_failing_seed(first, draw_group_scenario)
    print(f"{break_it.__name__}: seed {seed}: {violation}")


def test_a_failing_seed_is_shrunk_and_printed_with_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    break_merge_by_position(monkeypatch)
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
