"""The access log: what a line says, what it keeps to itself, and what it does when nobody reads it."""

from __future__ import annotations

import json
import os
import threading
from typing import Any

import pytest
from openai_fakes import FakeLLM
from quire.frontend.http.observe.access_log import AccessLog, AccessRecord
from quire.frontend.http.server import Server
from server_fakes import Peer, Scenario, run_with_server

KEY = "authorization: Bearer one\r\n"
SECRET = "a text that nobody logs"


def run_logged(scenario: Scenario, capfd: pytest.CaptureFixture[str], **options: Any) -> list[dict[str, Any]]:
    """The lines of a scenario's requests."""
    given = {"has_access_log": True, "log_format": "json", "log_level": "INFO"} | options
    run_with_server(scenario, api_keys=("one",), options=given, max_body_bytes=2000)
    return [json.loads(line) for line in capfd.readouterr().err.splitlines()]


def test_a_line_says_who_asked_for_what_and_how_it_went(capfd: pytest.CaptureFixture[str]) -> None:
    async def scenario(_llm: FakeLLM, peer: Peer, _server: Server) -> None:
        await peer.post("/v1/completions", {"prompt": SECRET}, KEY)
        status, _, body = await peer.read_answer()
        assert status == 200
        ids.append(json.loads(body)["id"])
        await peer.post("/v1/completions", {"prompt": SECRET, "stream": True}, KEY + "connection: close\r\n")
        await peer.read_all()

    ids: list[str] = []
    whole, stream = run_logged(scenario, capfd)
    assert whole["id"] == ids[0]
    for line in (whole, stream):
        assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/completions", 200)
        assert line["prompt_tokens"] > 0
        assert line["completion_tokens"] == 3
        assert (line["client"], len(line["key"]), line["level"]) == ("127.0.0.1", 8, "INFO")
        assert line["ms"] > 0
        assert SECRET not in str(line)


def test_a_refusal_says_its_cause_without_the_text(capfd: pytest.CaptureFixture[str]) -> None:
    async def scenario(_llm: FakeLLM, peer: Peer, _server: Server) -> None:
        for path, body, key in (
            ("/v1/completions", {"prompt": SECRET, "temperature": 9}, KEY),
            ("/v1/completions", {"prompt": [SECRET, {}]}, KEY),
            ("/v1/completions", {"prompt": SECRET}, ""),
            ("/v1/completion", {"prompt": SECRET}, KEY),
        ):
            one = await peer.make_neighbour()
            await one.post(path, body, key)
            await one.read_answer()
        await peer.post("/v1/completions", {"prompt": SECRET * 1000}, KEY)
        assert (await peer.read_answer())[0] == 413

    lines = run_logged(scenario, capfd)
    assert [line["status"] for line in lines] == [400, 400, 401, 404, 413]
    assert [line["level"] for line in lines] == ["WARNING"] * 5
    causes = [line["cause"] for line in lines]
    assert causes[0].startswith("temperature: expected `float` <= 2.0")
    assert causes[1].startswith("prompt")
    assert "API key" in causes[2]
    assert causes[3] == "Not Found"
    assert "max_body_bytes" in causes[4]
    assert SECRET not in str(lines)


def test_what_never_becomes_a_request_has_a_line_too(capfd: pytest.CaptureFixture[str]) -> None:
    async def scenario(_llm: FakeLLM, peer: Peer, _server: Server) -> None:
        await peer.say(b"\x00no http\r\n\r\n")
        assert (await peer.read_answer())[0] == 400

    (line,) = run_logged(scenario, capfd)
    assert (line["method"], line["status"]) == ("-", 400)
    assert line["cause"].startswith("request: valid HTTP/1.1")


def test_a_request_whose_client_leaves_is_a_499(capfd: pytest.CaptureFixture[str]) -> None:
    async def scenario(llm: FakeLLM, peer: Peer, _server: Server) -> None:
        llm.gate.clear()
        gone = await peer.make_neighbour()
        await gone.post("/v1/completions", {"prompt": "a"}, KEY)
        await llm.started.wait()
        gone.leave()
        await llm.wait_for_calls(1, 1)

    (line,) = run_logged(scenario, capfd)
    assert line["status"] == 499


def test_a_level_above_info_leaves_refusals_only(capfd: pytest.CaptureFixture[str]) -> None:
    async def scenario(_llm: FakeLLM, peer: Peer, _server: Server) -> None:
        assert await peer.ask_live()
        await peer.say(b"GET /live/x HTTP/1.1\r\nhost: localhost\r\n" + KEY.encode() + b"\r\n")
        assert (await peer.read_answer())[0] == 404
        await peer.say(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await peer.read_answer())[0] == 401

    def list_paths(**options: Any) -> list[str]:
        return [line["path"] for line in run_logged(scenario, capfd, **options)]

    assert list_paths() == ["/live", "/live/x", "/v1/models"]
    assert list_paths(unlogged_paths=("/live", "/v1/models")) == ["/live/x", "/v1/models"]
    assert list_paths(log_level="WARNING") == ["/live/x", "/v1/models"]
    assert list_paths(log_level="ERROR") == []
    assert list_paths(has_access_log=False) == []


def make_record(path: str = "/v1/x", status: int = 200) -> AccessRecord:
    record = AccessRecord("GET", path, "::1")
    record.status = status
    return record


def read_text(*records: AccessRecord) -> list[str]:
    read_end, write_end = os.pipe()
    log = AccessLog(fd=write_end)
    log.start()
    for record in records:
        log.note(record)
    log.close()
    os.close(write_end)
    with os.fdopen(read_end) as lines:
        return lines.read().splitlines()


def test_a_line_of_text_is_one_line_whatever_a_caller_writes() -> None:
    refused = make_record('/a b\n"c\x7f\x85', 400)
    refused.request_id, refused.cause = "id\r\nquire serve: forged", "field: a text"
    plain, quoted = read_text(make_record(), refused)
    assert plain.startswith("quire serve: 20")
    assert plain.endswith("Z GET /v1/x 200 0.0 ms client=::1")
    assert r'"/a b\n\"c\u007f' in quoted
    assert r'id="id\r\nquire serve: forged" client=::1 cause="field: a text"' in quoted
    assert quoted.isprintable()


def test_a_log_that_nobody_reads_leaves_lines_out_and_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe()
    blocked, goes_on, written = threading.Event(), threading.Event(), b""

    def write(_fd: int, data: bytes) -> int:
        nonlocal written
        blocked.set()
        assert goes_on.wait(10)
        written += data
        return len(data)

    monkeypatch.setattr("quire.frontend.http.observe.access_log._MAX_WAITING", 10)
    monkeypatch.setattr("os.write", write)
    log = AccessLog(fd=write_end)
    log.start()
    log.note(make_record())
    assert blocked.wait(10)
    for _ in range(15):
        log.note(make_record())  # returns at once
    goes_on.set()
    log.close()
    monkeypatch.undo()
    os.close(read_end)
    os.close(write_end)
    lines = written.decode().splitlines()
    assert len(lines) == 1 + 10 + 1
    assert "5 lines of the access log were left out" in lines[-1]


def test_a_log_whose_reader_has_left_does_not_end_the_thread() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    log = AccessLog(fd=write_end)
    log.start()
    for _ in range(3):
        log.note(make_record())
    log.close()
    os.close(write_end)
    assert not log._thread.is_alive()
