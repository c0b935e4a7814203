"""`quire stress --hostile` without processes: its turns, what a connection sees, and what the judge finds."""

from __future__ import annotations

import itertools
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager

import msgspec
import pytest
from quire.frontend.cli.entry import run_command
from quire.tools.stress.hostile import wire
from quire.tools.stress.hostile.attacks import ATTACKS
from quire.tools.stress.hostile.bodies import REQUESTS
from quire.tools.stress.hostile.grammars import GRAMMARS
from quire.tools.stress.hostile.judge import (
    Cost,
    HostileResult,
    check_answers,
    check_costs,
    check_latency,
    check_losses,
    check_memory,
    check_tries,
    judge_cost,
    measure_costs,
    measure_memory,
)
from quire.tools.stress.hostile.plan import Target, TurnReport, draw_turns
from quire.tools.stress.hostile.report import format_hostile
from quire.tools.stress.hostile.wire import Exchange, converse, make_request
from quire.tools.stress.measures import Latency, Phase, Times, measure
from quire.tools.stress.open_files import OpenFiles
from quire.tools.stress.record import Record
from quire.tools.stress.samples import Sample

TIMEOUT_S = 20.0
NAMES = tuple(ATTACKS)
MAX_HTTP_BODY = 8 * 1024 * 1024
CALM, LATER = Phase("calm", 0.0, 10.0), Phase("later", 10.0, 40.0)


def make_target(port: int = 0, scale: float = 1.0) -> Target:
    return Target(
        host="127.0.0.1",
        port=port,
        api_key="k",
        model="m",
        daemon="d",
        supervisor_pid=1,
        server_pid=1,
        scale=scale,
    )


def make_record(began_at: float, piece_times: list[float], broken_at: list[float]) -> Record:
    return Record(
        number=0,
        ask=0,
        client="http",
        behaviour="reads",
        began_at=began_at,
        piece_times=piece_times,
        broken_at=broken_at,
    )


def make_latency(
    gap_s: float, first_s: float, num: int = 1000, p99_s: float = 0.0, max_s: float = 0.0
) -> Latency:
    gap, first = (Times(num, s, p99_s or s, max_s or s) for s in (gap_s, first_s))
    return Latency(gap, first)


@contextmanager
def serve(handle: Callable[[socket.socket], None]) -> Generator[Target]:
    """A server whose every connection is handled in a thread of its own."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=handle, args=(connection,), daemon=True).start()

        acceptor = threading.Thread(target=accept, daemon=True)
        acceptor.start()
        yield make_target(listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)
        acceptor.join(TIMEOUT_S)


def answer(status: str, body: bytes = b"{}") -> Callable[[socket.socket], None]:
    def handle(connection: socket.socket) -> None:
        with connection:
            connection.recv(1)
            connection.sendall(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
            while connection.recv(65536):
                pass

    return handle


def ask(target: Target, exchange: Exchange, within_s: float = TIMEOUT_S) -> Counter[str]:
    return converse(target, [exchange], time.monotonic() + within_s)


def test_every_attack_has_its_turn_alone_and_in_pairs_and_a_seed_says_when():
    turns = draw_turns(3, NAMES, 300.0)
    assert turns == draw_turns(3, NAMES, 300.0) != draw_turns(4, NAMES, 300.0)
    assert Counter(turn.attack for turn in turns) == dict.fromkeys(ATTACKS, 3)
    alone = [turn for turn in turns if turn.begins_s < 149.9]
    assert {turn.attack for turn in alone} == set(ATTACKS)
    assert all(before.ends_s <= after.begins_s + 1e-6 for before, after in itertools.pairwise(alone))
    assert max(turn.ends_s for turn in turns) == pytest.approx(300.0)
    short = draw_turns(3, NAMES, 20.0)
    assert Counter(turn.attack for turn in short) == dict.fromkeys(ATTACKS, 1)


def test_every_attack_can_be_made_and_its_requests_fit_into_a_body():
    assert len(ATTACKS) == 82
    for name in ATTACKS.keys() - {"replaced-file"}:  # which starts an engine
        assert callable(ATTACKS[name].prepare(make_target(scale=0.001), random.Random(0)))
    for name, request in REQUESTS.items():
        assert all(len(body) <= MAX_HTTP_BODY for body in request.make_bodies(make_target())), name


@pytest.mark.parametrize("name", GRAMMARS)
def test_grammars_are_others_each_time_and_fit_into_a_body(name: str):
    rng = random.Random(0)
    drawn = [msgspec.json.encode(one) for _ in range(2) for one in GRAMMARS[name][0](make_target(), rng)]
    assert len(set(drawn)) == len(drawn)
    assert max(map(len, drawn)) < MAX_HTTP_BODY


def test_what_a_connection_is_told_is_counted():
    request = make_request(make_target(), "/x", b"{}")
    with serve(answer("200 OK")) as target:
        assert ask(target, Exchange([request])) == {"200": 1}
    with serve(answer("400 Bad Request", b"a" * 100_000)) as target:
        assert ask(target, Exchange([request])) == {"echoed": 1}
    with serve(lambda connection: connection.close()) as target:
        assert ask(target, Exchange([request])) == {"cut": 1}
    assert ask(target, Exchange([request])) == {"not accepted": 1}


def test_a_stream_without_end_goes_on_until_it_is_cut_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wire, "_ANSWER_TIME_S", 0.1)

    def refuse_and_close(connection: socket.socket) -> None:
        with connection:
            connection.recv(1)
            connection.sendall(b"HTTP/1.1 431 Too Large\r\nContent-Length: 0\r\n\r\n")

    def make() -> Exchange:
        return Exchange(itertools.repeat(b"a" * 65536, 32), is_endless=True)

    with serve(refuse_and_close) as target:
        assert ask(target, make()) == {"431": 1}
    with serve(answer("431 Too Large")) as target:  # and reads all the rest
        assert ask(target, make(), within_s=1.0) == {"swallowed": 1}


def test_a_body_behind_an_upgrade_is_a_request_to_those_who_stop_parsing_there():
    def stop_parsing(connection: socket.socket) -> None:
        with connection:
            _, _, body = connection.recv(65536).partition(b"\r\n\r\n")
            if not body:  # on a busy machine it comes with the head
                connection.recv(65536)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + b"HTTP/1.1 200 OK\r\n\r\n")

    with serve(stop_parsing) as target:
        play = ATTACKS["upgrade"].prepare(target, random.Random(0))
        assert play(time.monotonic() + TIMEOUT_S) == {"smuggled": 2}
    assert "smuggled" not in ATTACKS["upgrade"].allowed


def test_latencies_are_of_what_came_in_the_phase():
    records = [
        make_record(9.0, [9.5, 9.6, 10.5], []),
        make_record(20.0, [20.2, 20.3], []),
        make_record(20.0, [], []),
    ]
    calm, later = measure(records, CALM), measure(records, LATER)
    assert calm is not None
    assert later is not None
    assert (calm.first.num, calm.gaps.max_s, calm.first.max_s) == (1, pytest.approx(0.1), 0.5)
    assert (later.first.num, later.gaps.max_s) == (1, pytest.approx(0.9))
    assert measure(records, Phase("", 50.0, 60.0)) is None
    early = measure(records, Phase("", 9.0, 10.0, is_to_blame=True))
    assert early is not None
    assert early.gaps.max_s == pytest.approx(0.9)


def test_latency_may_double_and_gain_the_margin():
    calm = make_latency(0.02, 0.05)
    assert check_latency(calm, make_latency(0.139, 0.199), 0.1) == []
    frozen = make_latency(0.1, 0.1, max_s=2.0)
    assert check_latency(calm, frozen, 0.1) == [
        "ordinary streams' longest gap is 2000 ms, at most 2 x 20 + 1000 = 1040 ms"
    ]
    lines = check_latency(calm, make_latency(0.15, 0.25), 0.1)
    assert lines == [
        "ordinary streams' p99 gap is 150 ms, at most 2 x 20 + 100 = 140 ms",
        "ordinary streams' p99 time to first token is 250 ms, at most 2 x 50 + 100 = 200 ms",
    ]
    assert check_latency(calm, None, 0.1) == ["no ordinary stream had a token while attacked"]


def test_an_ordinary_request_that_was_sent_again_breaks_the_promise():
    assert check_tries([make_record(0.0, [], [])]) == []
    (line,) = check_tries([make_record(0.0, [], [1.0, 2.0])])
    assert line == "1 ordinary requests were refused (503) or cut off, 2 times in all"


def report(attack: str, error: str = "", **answers: int) -> TurnReport:
    return TurnReport(attack=attack, began_at=0.0, ended_at=1.0, answers=answers, error=error)


def test_an_answer_that_an_attack_may_not_get_is_named():
    refused = TurnReport(attack="chat", began_at=0.0, ended_at=1.0, answers={"413": 3, "500": 2})
    lines = check_answers([refused, refused, report("junk", sent=5), report("calls", error="OSError: x")])
    assert lines[0] == "calls could not be played: OSError: x"
    assert lines[1].startswith("chat was answered '500' 4 times, allowed: 200, ")
    assert len(lines) == 2


def play(attack: str, began_at: float, ended_at: float) -> TurnReport:
    return TurnReport(attack=attack, began_at=began_at, ended_at=ended_at, answers={"200": 1})


def test_each_attack_costs_what_streams_felt_while_it_ran_alone():
    reports = [play("a", 20.0, 22.1), play("b", 22.0, 24.0), play("a", 24.0, 26.0), play("b", 24.0, 26.0)]
    records = [
        make_record(21.0, [21.5, 22.5], []),  # begun beside "a", whose late end the gap is
        make_record(22.2, [22.3, 22.4], []),
        make_record(24.1, [25.0, 25.9], []),  # beside both: nobody's
    ]
    first, second = measure_costs(records, reports, None, 0.1)
    assert (first.attack, second.attack) == ("a", "b")
    assert first.latency is not None
    assert second.latency is not None
    assert (first.latency.gaps.max_s, first.latency.first.max_s) == (1.0, 0.5)
    assert (second.latency.gaps.max_s, second.latency.first.max_s) == pytest.approx((0.1, 0.1))
    (never,) = measure_costs(records, [play("a", 24.0, 26.0), play("a", 24.0, 26.0)], None, 0.1)
    assert never == Cost(attack="a", latency=None)


def test_an_attack_that_costs_too_much_is_named_and_few_samples_are_judged_by_their_median():
    calm = make_latency(0.02, 0.05)
    slow, few = (make_latency(0.02, 0.05, num, p99_s=0.5) for num in (1000, 3))
    frozen = make_latency(0.9, 0.05, 16, p99_s=0.9)
    costs = [
        judge_cost(Cost(attack=name, latency=one), calm, 0.1)
        for name, one in (("calm", calm), ("slow", slow), ("few", few), ("frozen", frozen), ("none", None))
    ]
    lines = check_costs(costs)
    assert lines == [
        "slow, alone: ordinary streams' p99 gap is 500 ms, at most 2 x 20 + 100 = 140 ms",
        "slow, alone: ordinary streams' p99 time to first token is 500 ms, at most 2 x 50 + 100 = 200 ms",
        "frozen, alone: ordinary streams' median gap is 900 ms, at most 2 x 20 + 100 = 140 ms",
    ]
    records = [make_record(1.0, [1.05, 1.07], [])]
    result = HostileResult(phases=[CALM, LATER], records=records, costs=costs, broken=lines)
    said = [line.split() for line in format_hostile(result, 0.1).splitlines()]
    names = {one.attack for one in costs}
    ends = {words[0]: " ".join(words[9:]) for words in said if words and words[0] in names}
    assert ends == {
        "calm": "holds",
        "slow": "BROKEN, p99 gap by 360 ms, p99 time to first token by 300 ms",
        "few": "too few samples, by the median: holds",
        "frozen": "too few samples, by the median: BROKEN, median gap by 760 ms",
        "none": "no sample alone",
    }


def sample(at: float, role: str, pid: int, size_mb: float) -> Sample:
    return Sample(at, role, pid, int(size_mb * 1e6), OpenFiles(1, 0, 0))


def test_a_process_that_was_replaced_is_named_by_its_owners_words_or_its_number():
    samples = [sample(1.0, "http", 1, 50.0), sample(1.0, "http", 2, 50.0), sample(1.0, "core", 3, 30.0)]
    counts = {"core": 1, "http": 2}
    assert check_losses(samples, counts, "quire: all is well") == []
    more = [*samples, sample(2.0, "http", 4, 50.0)]
    assert check_losses(more, counts, "") == ["3 http processes ran, not 2"]
    said = "quire: http (pid 1) was killed by SIGKILL: it said nothing for 10 s; starting another"
    assert check_losses(more, counts, said) == [f"a process was lost: {said}"]


def grow(*sizes_mb: float) -> list[Sample]:
    return [sample(1.0 + at, "http", 1, size_mb) for at, size_mb in enumerate(sizes_mb)]


@pytest.mark.parametrize(
    ("sizes_mb", "what"),
    [
        ([50.0] * 9 + [300.0] * 10 + [60.0] * 20, []),
        ([50.0] * 9 + [900.0] * 10 + [60.0] * 20, ["memory of http reached 900 MB, at most 434 MB (50 whi"]),
        ([50.0] * 9 + [300.0] * 30, ["memory of http stays at 300 MB after the attacks, at most 146 MB"]),
        ([50.0] * 29 + [60.0] * 5 + [75.0] * 5, ["memory of http grows after the attacks: 15 MB in the"]),
    ],
)
def test_memory_has_a_bound_and_comes_back_and_stays(sizes_mb: list[float], what: list[str]):
    lines = check_memory(measure_memory(grow(*sizes_mb), CALM, Phase("settling", 20.0, 40.0)))
    assert len(lines) == len(what)
    for line, beginning in zip(lines, what, strict=True):
        assert line.startswith(beginning)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--kills", "core"], "kills='core': not given with --hostile"),
        (["--attacks", "chat,tea"], "attacks='chat,tea': expected none, or of text, "),
        (["--duration", "0"], "duration=0.0: expected a number above 0"),
        (["--simulate", "3"], "hostile=True: not given with --simulate"),
    ],
)
def test_options_of_a_hostile_run_are_checked_first(
    arguments: list[str], what: str, capsys: pytest.CaptureFixture[str]
):
    assert run_command(["stress", "--hostile", *arguments]) == 2
    assert what in capsys.readouterr().err
