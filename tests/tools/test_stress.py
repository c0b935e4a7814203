"""The pure parts of `quire stress`: what it draws, how it paces kills, what it finds and measures."""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import subprocess
from collections.abc import AsyncIterator
from typing import Any, cast

import msgspec
import pytest
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.cli.entry import run_command
from quire.frontend.events import AssistantMessage, ToolCall
from quire.frontend.outputs import CompletionOutput, RequestOutput
from quire.frontend.requests.beam_search import BeamSearchOutput, BeamSearchSequence
from quire.ipc.errors import InputError
from quire.ipc.processes.restarts import MAX_LOSSES, MAX_WORKER_LOSSES, RestartBudget
from quire.ipc.spec.config import RecoveryConfig
from quire.tools.sim import simulate
from quire.tools.stress.answers import join_beams
from quire.tools.stress.asks import Abilities, Arrival, Ask, ClientPlan, deal, draw_arrivals, draw_pool
from quire.tools.stress.chats import (
    Delta,
    DeltaCall,
    DeltaJoiner,
    Function,
    is_beginning,
    join_message,
    list_chats,
)
from quire.tools.stress.checks import check_records, count_failed
from quire.tools.stress.client import AsyncClient
from quire.tools.stress.kills import METHODS, ROLES, Kill, KillPace, Strike, draw_exact_kills, draw_kills
from quire.tools.stress.long_prompt import Row, format_rows
from quire.tools.stress.measures import Times, find_recoveries, measure
from quire.tools.stress.open_files import SHM_FOLDER, OpenFiles, OwnShm, count_open_files
from quire.tools.stress.record import Golden, Record
from quire.tools.stress.samples import Sample, find_slopes
from quire.tools.stress.site import is_running
from quire.tools.stress.stress import check_kills
from quire.tools.stress.waiting import wait_until

GOLDEN = [Golden([7, 8, 9], "abc")]


def make_record(**changes: Any) -> Record:
    fields: dict[str, Any] = {
        "number": 0,
        "ask": 0,
        "client": "async",
        "behaviour": "reads",
        "began_at": 0.0,
        "end": "finished",
        "num_ends": 1,
        "token_ids": [7, 8, 9],
        "text": "abc",
        "num_tokens": 3,
    }
    return Record(**fields | changes)


@pytest.mark.parametrize(
    "record",
    [
        make_record(),
        make_record(client="http", token_ids=[]),
        make_record(end="left", num_ends=0, token_ids=[7, 8], text="ab", num_tokens=2),
        make_record(end="left", client="http", num_ends=0, token_ids=[], text="a", num_tokens=0),
    ],
)
def test_a_request_that_got_what_it_is_owed_breaks_nothing(record: Record):
    assert check_records([0], [record], GOLDEN) == []


@pytest.mark.parametrize(
    ("record", "what"),
    [
        (make_record(end="failed", error="gone"), "failed: gone"),
        (make_record(num_ends=0), "0 final outputs"),
        (make_record(num_ends=2), "2 final outputs"),
        (make_record(num_tokens=2), "2 tokens, not 3"),
        (make_record(token_ids=[7, 9, 9]), "from position 1 on: [9, 9], not [8, 9]"),
        (make_record(client="http", token_ids=[], text="abd"), "from position 2 on: 'd', not 'c'"),
        (make_record(end="left", token_ids=[8], text="b"), "[8], not [7, 8, 9], before it was left"),
        (make_record(end="left", token_ids=[7, 7, 8], text="aab"), "[7, 8], not [8, 9], before it was left"),
    ],
)
def test_a_request_that_got_something_else_is_named(record: Record, what: str):
    (line,) = check_records([0], [record], GOLDEN)
    assert what in line


def test_a_request_that_ended_never_or_twice_is_named():
    (line,) = check_records([0], [], GOLDEN)
    assert "request 0 ended 0 times" in line
    (line,) = check_records([0], [make_record(), make_record()], GOLDEN)
    assert "request 0 ended 2 times" in line
    assert count_failed([make_record(end="failed"), make_record()]) == 1


def test_a_seed_gives_the_same_load_and_another_seed_another():
    def draw(seed: int) -> Any:
        arrivals = draw_arrivals(seed, 5.0, 20.0, 8, 0.2)
        return draw_pool(seed, 8, 50), arrivals, draw_kills(seed, ROLES, METHODS, 2.0, 40.0)

    assert draw(1) == draw(1)
    assert all(one != other for one, other in zip(draw(1), draw(2), strict=True))
    _, arrivals, kills = draw(1)
    assert {arrival.behaviour for arrival in arrivals} == {"reads", "leaves", "slow"}
    assert {(kill.role, kill.method) for kill in kills} == {(role, how) for role in ROLES for how in METHODS}
    assert [int(kill.due_s / 2.0) for kill in kills] == list(range(20))


def test_what_is_rays_is_killed_and_counts_as_a_workers_death():
    kills = draw_kills(1, ("actor", "node"), METHODS, 2.0, 40.0)
    assert {(kill.role, kill.method) for kill in kills} == {("actor", "KILL"), ("node", "KILL")}
    pace = KillPace(RecoveryConfig())
    for at, role in enumerate(("actor", "node", "worker")):
        assert pace.find_delay_s(role, float(at)) == 0.0
        pace.note(role, float(at), is_core_ready=True)
    assert pace.find_delay_s("node", 3.0) == pace.find_delay_s("worker", 3.0) > 50.0


def test_every_arrival_goes_to_one_client_and_an_endless_plan_numbers_on():
    arrivals = draw_arrivals(3, 5.0, 20.0, 8, 0.5)
    shares = deal(arrivals, ("http", "async", "llm"))
    assert sorted(one.number for share in shares.values() for one in share) == list(range(len(arrivals)))
    assert {one.behaviour for one in shares["llm"]} == {"reads"}
    plan = ClientPlan(
        kind="async",
        daemon="d",
        url="",
        model="",
        pool=[],
        arrivals=arrivals[:3],
        is_endless=True,
        timeout_s=1.0,
    )
    found = [one for one, _ in zip(plan.list_arrivals(), range(7), strict=False)]
    assert [one.number for one in found] == list(range(7))
    assert [one.ask for one in found] == [arrivals[place % 3].ask for place in range(7)]


def test_some_requests_are_of_every_other_kind_that_the_engine_is_able_to_do():
    chats = list_chats(has_tools=True, has_thoughts=True)
    every = Abilities(has_processor=True, dimensions=[None, 8], chats=chats)
    pool, bare = draw_pool(1, 72, 200, every), draw_pool(1, 72, 200, Abilities())
    searches = [ask for ask in pool if ask.beam_width is not None]
    assert all(isinstance(ask.prompt, str) and "n" in ask.make_body("m") for ask in searches)
    assert len(searches) == sum(bool(ask.extra_args) for ask in pool) == 9
    vectors = [ask for ask in pool if ask.embeds]
    assert len(vectors) == 12
    assert {ask.make_body("m").get("dimensions") for ask in vectors} == {None, 8}
    assert {ask.path for ask in vectors} == {"/v1/embeddings"}
    assert all(ask.make_body("m")["input"] == ask.prompt and not ask.is_streamed for ask in vectors)
    asked = [ask.chat for ask in pool if ask.chat is not None]
    assert {(chat.tool_choice, chat.is_thinking) for chat in asked} == {
        (choice, thinks) for choice in ("auto", "required", None) for thinks in (False, True)
    } - {(None, False)}
    bodies = [ask.make_body("m") for ask in pool if ask.chat is not None]
    assert all("prompt" not in body and body["messages"][0]["role"] == "user" for body in bodies)
    assert sum(ask != other for ask, other in zip(bare, draw_pool(1, 72, 200), strict=True)) == 9
    assert not any(ask.extra_args or ask.embeds or ask.chat for ask in bare)
    assert list_chats(has_tools=False, has_thoughts=False) == []


@pytest.mark.parametrize(
    ("deltas", "message"),
    [
        ([Delta("4"), Delta(), Delta("2")], AssistantMessage("42")),
        ([Delta(None, "A "), Delta(None, "sum."), Delta("42")], AssistantMessage("42", "A sum.")),
        (
            [
                Delta("", "Hm"),
                *(Delta(None, None, [DeltaCall(index, Function("f", ""))]) for index in range(2)),
                Delta(None, None, [DeltaCall(1, Function(None, "{}"))]),
            ],
            AssistantMessage("", "Hm", [ToolCall("a", "f"), ToolCall("b", "f", "{}")]),
        ),
        (
            [Delta("4"), Delta(None, None, [DeltaCall(0, Function("f", "{}"))]), Delta("<tool_call>")],
            AssistantMessage("4<tool_call>", "", [ToolCall("a", "f", "{}")]),
        ),
    ],
)
def test_the_deltas_of_a_chat_join_to_the_whole_answer(deltas: list[Delta], message: AssistantMessage):
    joiner = DeltaJoiner()
    texts = list(map(joiner.take, deltas))
    assert texts[-1] == join_message(message)
    assert all(is_beginning(text, texts[-1]) for text in texts)
    assert not is_beginning(texts[-1] + "?", texts[-1])


def test_all_beams_of_a_search_are_owed():
    beams = [
        BeamSearchSequence([1, 2, token], [None], 0.0, f"Once{token}", "length", None, 0.0)
        for token in (7, 8)
    ]
    ask = Ask(prompt="Once", max_tokens=1, seed=None, beam_width=2)
    assert join_beams(ask, BeamSearchOutput(beams)) == Golden([7, 8], "78")


@pytest.mark.parametrize("seed", range(5))
def test_kills_as_fast_as_the_pace_allows_end_no_engine(seed: int):
    pace, budget = KillPace(RecoveryConfig()), RestartBudget()
    now, worker_deaths = 0.0, list[float]()
    for kill in draw_exact_kills(seed, {"core": 30, "worker": 60}):
        now += 0.1 + pace.find_delay_s(kill.role, now + 0.1)
        is_core_ready = kill.which % 4 > 0
        pace.note(kill.role, now, is_core_ready)
        if kill.role == "core" or not is_core_ready:
            assert budget.note_loss(now) is not None
            worker_deaths.clear()
        else:
            worker_deaths = [at for at in worker_deaths if now - at < 60.0] + [now]
            assert len(worker_deaths) <= MAX_WORKER_LOSSES
    assert now < 62.1 * 90 / MAX_WORKER_LOSSES
    assert pace.find_delay_s("client", now) == 0.0


def test_an_engine_that_may_lose_more_is_killed_more_often():
    pace = KillPace(RecoveryConfig(max_core_restarts=2, max_worker_restarts=4, restart_window_s=10.0))
    for at in range(3):
        assert pace.find_delay_s("worker", float(at)) == 0.0
        pace.note("worker", float(at), is_core_ready=True)
    assert pace.find_delay_s("worker", 3.0) == 0.0
    pace.note("worker", 3.0, is_core_ready=True)
    assert pace.find_delay_s("worker", 4.0) == 8.0  # the first of four, 10 s and a margin of 2 s
    for at in (5.0, 6.0):
        pace.note("core", at, is_core_ready=True)
    assert pace.find_delay_s("core", 7.0) == 10.0


def test_an_http_process_that_ends_late_still_counts_within_the_pace():
    pace, budget, end_s = KillPace(RecoveryConfig()), RestartBudget(), 5.0
    now = 0.0
    for place in range(12):
        now += pace.find_delay_s("http", now)
        pace.note("http", now, is_core_ready=True)
        is_slow = place < MAX_LOSSES  # by SIGTERM, the others at once
        assert budget.note_loss(now + end_s * is_slow) is not None
        now += 0.1


def test_a_process_that_an_engine_may_not_lose_is_not_killed():
    recovery = RecoveryConfig(max_core_restarts=3, max_worker_restarts=0)
    check_kills(("core", "http", "client"), recovery)
    with pytest.raises(
        InputError, match=r"kills='core,worker': expected no worker of .*max_worker_restarts=0"
    ):
        check_kills(("core", "worker"), recovery)
    with pytest.raises(InputError, match="no worker of"):  # its death may count as its core's
        check_kills(("worker",), RecoveryConfig(max_core_restarts=0))


def strike(role: Any, at: float) -> Strike:
    return Strike(Kill(0.0, role, "KILL", 0, 0.0), 1, at)


def test_a_run_that_ended_before_its_first_kill_has_no_recovery() -> None:
    assert find_recoveries([], [], 0.0) == []


def test_recovery_is_the_silence_after_the_kill_and_not_what_was_on_its_way():
    records = [make_record(piece_times=[9.9, 10.01, 11.5, 11.6]), make_record(piece_times=[10.02, 11.7])]
    (recovery,) = find_recoveries(records, [strike("core", 10.0)], 4.0)
    assert (recovery.at_s, recovery.role) == (6.0, "core")
    assert recovery.recovery_s == pytest.approx(1.5)
    (recovery,) = find_recoveries(records, [strike("core", 20.0)], 4.0)
    assert recovery.recovery_s is None


def test_a_time_without_requests_is_no_silence():
    records = [
        make_record(began_at=9.0, ended_at=10.3, piece_times=[10.2, 10.3]),
        make_record(began_at=13.0, ended_at=14.0, piece_times=[13.1, 13.9, 14.0]),
        make_record(client="llm", is_streamed=False, began_at=10.0, ended_at=13.05, piece_times=[13.05]),
    ]
    (recovery,) = find_recoveries(records, [strike("worker", 10.0)], 0.0)
    assert recovery.recovery_s == pytest.approx(3.9)  # the 0.8 s before it, not the 2.7 s before 13.0


def test_recovery_from_a_lost_server_is_until_the_last_broken_request_goes_on():
    records = [
        make_record(client="http", broken_at=[10.0], piece_times=[10.4, 10.5]),
        make_record(client="http", broken_at=[10.1], piece_times=[10.9]),
        make_record(client="http", piece_times=[9.0, 14.0]),
    ]
    (recovery,) = find_recoveries(records, [strike("http", 10.0)], 0.0)
    assert recovery.recovery_s == pytest.approx(0.9)


def test_gaps_are_within_answers():
    latency = measure([make_record(piece_times=[1.0, 1.5, 1.6]), make_record(piece_times=[9.0])])
    assert latency is not None
    assert latency.gaps.max_s == pytest.approx(0.5)
    assert measure([make_record(piece_times=[1.0])]) is None


def sample(at: float, role: str, pid: int, rss_bytes: int, num_fds: int = 20) -> Sample:
    return Sample(at, role, pid, rss_bytes, OpenFiles(num_fds, num_fds - 10, 1))


def test_growth_is_a_request_and_of_the_longest_life_without_its_beginning():
    late = [sample(60.0 + at, "core", 1, 1_000 * (50 + at), 20 + at) for at in range(20)]
    early = [sample(40.0 + at, "core", 1, 0, 5) for at in range(20)]
    short = [sample(99.0, "core", 2, 0), sample(99.0, "worker", 3, 0)]  # the worker lived too short
    end_times = [40.0 + half / 2 for half in range(80)]  # two requests a second
    (slope,) = find_slopes([*early, *late, *short], end_times)
    assert (slope.role, slope.lived_s, slope.num_requests) == ("core", 39.0, 38)
    assert slope.rss_bytes == pytest.approx(500.0)
    assert slope.fds == pytest.approx(0.5)
    (slope,) = find_slopes([*early, *late], [])
    assert slope.rss_bytes == 0.0


def test_a_request_that_the_engine_fails_has_failed_for_its_client_too(
    capfdbinary: pytest.CaptureFixture[bytes],
):
    class FailingLLM:
        async def generate(self, _prompt: Any, _params: Any) -> AsyncIterator[RequestOutput]:
            end = CompletionOutput(index=0, text="", token_ids=[], finish_reason="error")
            yield RequestOutput("r", None, [1], None, [end], finished=True, error="it kills workers")

    ask = Ask(prompt=[1], max_tokens=3, seed=None)
    arrival = Arrival(number=0, due_s=0.0, ask=0)
    plan = ClientPlan(
        kind="async", daemon="d", url="", model="", pool=[ask], arrivals=[arrival], timeout_s=5.0
    )
    client = AsyncClient(plan)
    client._llm = cast(AsyncLLM, FailingLLM())
    asyncio.run(client._ask_in_time(arrival))
    record = msgspec.json.decode(capfdbinary.readouterr().out, type=Record)
    assert (record.end, record.error, record.num_ends) == ("failed", "it kills workers", 1)


def test_a_process_that_is_dead_and_unseen_does_not_run():
    with subprocess.Popen(["true"]) as child:
        assert wait_until(lambda: not is_running(child.pid), 10.0)
    assert is_running(os.getpid())


def test_what_a_process_has_of_children_may_be_left_out_and_nothing_else():
    before, now = OpenFiles(40, 11, 0), OpenFiles(43, 12, 0)
    assert now.without_children(2) == before.without_children(1)
    assert OpenFiles(44, 12, 0).without_children(2) != before.without_children(1)
    assert OpenFiles(43, 13, 0).without_children(2) != before.without_children(1)


def test_sockets_and_shared_memory_are_counted_and_what_is_abandoned_is_found():
    own, others = OwnShm(), OwnShm()
    counts = count_open_files(os.getpid())
    path = SHM_FOLDER / f"test-of-stress-x{os.urandom(4).hex()}"
    with socket.socket(), path.open("x+b") as file:
        try:
            file.truncate(4096)
            with mmap.mmap(file.fileno(), 4096):
                now = count_open_files(os.getpid())
                assert now.num_fds == counts.num_fds + 3  # mmap has its own
                assert now.num_sockets == counts.num_sockets + 1
                assert now.num_shm == counts.num_shm + 1
                own.note(os.getpid())
                assert path.name not in own.find_abandoned()
            assert path.name in own.find_abandoned()
            assert path.name not in others.find_abandoned()  # another program's
        finally:
            path.unlink()
    assert path.name not in own.find_abandoned()


def test_shared_memory_that_names_a_process_is_of_the_run_only_if_the_process_is():
    own, earlier = OwnShm(), os.getpid()
    with subprocess.Popen(["sleep", "60"]) as child:
        own.note(child.pid)
        child.kill()
    made = {pid: SHM_FOLDER / f"__LIBRARY_OF_A_TEST_{pid}_0" for pid in (child.pid, earlier)}
    try:
        for path in made.values():
            path.touch(exist_ok=False)
        abandoned = own.find_abandoned()
        assert made[child.pid].name in abandoned
        assert made[earlier].name not in abandoned
    finally:
        for path in made.values():
            path.unlink()


@pytest.mark.parametrize(
    ("argument", "value", "field"),
    [("--model", "no/such/folder", "model"), ("--engines", "0", "data_parallel_size")],
)
def test_an_engine_that_cannot_be_is_refused_before_it_starts(
    argument: str, value: str, field: str, capsys: pytest.CaptureFixture[str]
):
    assert run_command(["stress", argument, value]) == 2
    assert f"{field}={value!r}" in capsys.readouterr().err.replace("=0:", "='0':")


def test_simulated_seeds_are_played_from_the_given_one_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    assert run_command(["stress", "--simulate", "20"]) == 0
    assert capsys.readouterr().out.startswith("20 seeds, ")
    played: list[range] = []
    monkeypatch.setattr(simulate, "simulate", lambda seeds: played.append(seeds) or 1)
    assert run_command(["stress", "--simulate", "5", "--seed", "7"]) == 1
    assert played == [range(7, 12)]


def test_streams_may_wait_twice_as_long_beside_a_long_prompt_or_a_tenth_of_a_second() -> None:
    def row(before_s: float, during_s: float) -> Row:
        times = [Times(num=9, p50_s=p99_s / 2, p99_s=p99_s, max_s=p99_s) for p99_s in (before_s, during_s)]
        return Row("fcfs", *times, alone_s=2.0, beside_s=2.5)

    rows = [row(0.01, 0.1), row(0.01, 0.11), row(0.2, 0.4), row(0.2, 0.41)]
    assert [one.is_within for one in rows] == [True, False, True, False]
    assert ["fcfs", "100", "200", "200", "205", "410", "410", "BROKEN", "2.00", "2.50"] in map(
        str.split, format_rows(rows).splitlines()
    )
