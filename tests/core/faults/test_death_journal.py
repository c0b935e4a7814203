"""Requests that are there when engine cores die: run alone, and failed if that is when the next ones die."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from fakes import FakeEngine, expected_output, make_config, make_request
from quire.core.engine.engine_core import EngineCore
from quire.core.faults.blame import FAILURES_ALONE
from quire.core.faults.death_journal import DeathJournal
from quire.ipc.protocol.messages import SUSPECT_ATTEMPTS, EngineCoreRequest, ErrorCode


def test_a_request_is_counted_once_for_each_core_that_dies_while_it_is_alone(tmp_path: Path) -> None:
    path = str(tmp_path / "deaths.json")
    DeathJournal(path).note_alone("a")
    second = DeathJournal(path)
    assert second.num_deaths == {"a": 1}
    assert DeathJournal(path).num_deaths == {"a": 1}  # the second died before anything was alone
    second.note_alone("a")
    assert DeathJournal(path).num_deaths == {"a": 2}


def test_what_got_further_is_forgotten(tmp_path: Path) -> None:
    path = str(tmp_path / "deaths.json")
    DeathJournal(path).note_alone("a")
    second = DeathJournal(path)
    second.note_alone("a")
    second.note_alone("b")
    assert DeathJournal(path).num_deaths == {"b": 1}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"num_deaths": {"a": "many"}}'])
def test_a_file_that_cannot_be_read_says_nothing(tmp_path: Path, text: str) -> None:
    path = tmp_path / "deaths.json"
    path.write_text(text)
    assert DeathJournal(str(path)).num_deaths == {}
    assert DeathJournal("").num_deaths == {}


def test_a_journal_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    journal = DeathJournal(str(tmp_path / "gone" / "deaths.json"))
    journal.note_alone("a")
    assert journal.num_deaths == {}


def resumed(name: str, num_attempts: int) -> EngineCoreRequest:
    request = make_request(name, [len(name), ord(name[-1])], max_tokens=8)
    return msgspec.structs.replace(request, is_resumed=True, num_attempts=num_attempts)


def test_suspects_run_alone_one_after_the_other_and_then_everybody() -> None:
    engine = FakeEngine(make_config(), 64)
    requests = [resumed(f"r{i}", SUSPECT_ATTEMPTS if i in (1, 4) else i % SUSPECT_ATTEMPTS) for i in range(6)]
    engine.add_all(requests[:3])
    alone = [engine.core.blame.alone]
    engine.turn()
    engine.add_all(requests[3:])
    while engine.core.num_unfinished:
        if engine.core.blame.alone is not None:
            alone.append(engine.core.blame.alone)
        assert engine.turn()
        if engine.core.blame.alone is not None:
            assert {len(step.rows) for step in engine.executor.pending} <= {1}
        assert engine.core.check_integrity() == []
    assert list(dict.fromkeys(alone)) == ["r1", "r4"]
    for request in requests:
        assert engine.tokens[request.request_id] == expected_output(request, 128)[0]


def test_what_an_ended_suspects_last_step_does_is_not_laid_on_the_next_suspect() -> None:
    engine = FakeEngine(make_config(), 64)
    for name in ("r0", "r1"):
        engine.add(resumed(name, SUSPECT_ATTEMPTS))
    assert engine.launch() is not None
    engine.core.abort_requests(b"client", ["r0"])
    engine.deliver()
    assert engine.launch() is None
    assert engine.core.blame.alone == "r0"  # whose step may still be the death of this core
    engine.finish_step()
    assert engine.core.blame.alone == "r1"
    engine.run()
    assert engine.tokens["r1"] == expected_output(resumed("r1", 0), 128)[0]


def test_what_steps_in_flight_do_is_not_laid_on_a_suspect_that_comes() -> None:
    engine = FakeEngine(make_config(), 64)
    engine.worker.poisoned.add("r0")
    for name in ("r0", "r1"):
        engine.add(resumed(name, 0))
    assert engine.launch() is not None
    engine.add(resumed("r2", SUSPECT_ATTEMPTS))
    assert engine.core.blame.alone is None
    assert engine.launch() is None
    engine.run()
    assert engine.finals["r0"].error_code is ErrorCode.POISON_REQUEST
    for name in ("r1", "r2"):
        assert engine.tokens[name] == expected_output(resumed(name, 0), 128)[0]
    assert engine.core.check_integrity() == []


def test_a_request_that_was_alone_at_two_deaths_fails_and_its_report_holds_no_text() -> None:
    engine = FakeEngine(make_config(), 64)
    engine.core = EngineCore(
        engine.config, 64, engine.clock, b"s", engine.clock, num_deaths_alone={"r1": FAILURES_ALONE, "r0": 1}
    )
    for i in range(3):
        engine.add(resumed(f"r{i}", 4))
    engine.run()
    assert engine.finals["r1"].error_code is ErrorCode.POISON_REQUEST
    assert [engine.finals[name].error_code for name in ("r0", "r2")] == [None, None]
    (report,) = engine.core.failures.take_poison_reports()
    assert (report.request_id, report.client, report.code) == ("r1", b"client".hex(), "poison_request")
    assert (report.found_by, report.num_prompt_tokens, report.num_attempts) == ("core death", 2, 4)
    assert engine.core.failures.take_poison_reports() == []
