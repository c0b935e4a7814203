"""The access log: what a line says, what it keeps to itself, and what it does when nobody reads it."""

from __future__ import annotations

import json
import os
import re
import threading
from typing import Any

import pytest
from quire.frontend.http.observe.access_log import AccessLog, AccessRecord
from server_fakes import OpenServer, RunningServer

KEY = "authorization: Bearer one\r\n"
SECRET = "a text that nobody logs"
LOGGED: dict[str, Any] = {"has_access_log": True, "log_format": "json", "log_level": "INFO"}
HOW: dict[str, Any] = {"api_keys": ("one",), "options": LOGGED, "max_body_bytes": 2000}
pytestmark = pytest.mark.server(**HOW)


async def read_lines(running: RunningServer, capfd: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """Of all requests, once the server has ended."""
    await running.stop()
    return [json.loads(line) for line in capfd.readouterr().err.splitlines()]


async def test_a_line_says_who_asked_for_what_and_how_it_went(
    running: RunningServer, capfd: pytest.CaptureFixture[str]
) -> None:
    peer = running.peer
    await peer.post("/v1/completions", {"prompt": SECRET}, KEY)
    status, _, body = await peer.read_answer()
    assert status == 200
    await peer.post("/v1/completions", {"prompt": SECRET, "stream": True}, KEY + "connection: close\r\n")
    await peer.read_all()
    whole, stream = await read_lines(running, capfd)
    assert whole["id"] == json.loads(body)["id"]
    for line in (whole, stream):
        assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/completions", 200)
        assert line["prompt_tokens"] > 0
        assert line["completion_tokens"] == 3
        assert (line["client"], len(line["key"]), line["level"]) == ("127.0.0.1", 8, "INFO")
        assert line["ms"] > 0
        assert SECRET not in str(line)


async def test_a_refusal_says_its_cause_without_the_text(
    running: RunningServer, capfd: pytest.CaptureFixture[str]
) -> None:
    # What is said, and the status and the beginning of the cause that are logged.
    refused: list[tuple[str, object, str, int, str]] = [
        (
            "/v1/completions",
            {"prompt": SECRET, "temperature": 9},
            KEY,
            400,
            "temperature: expected `float` <= 2",
        ),
        ("/v1/completions", {"prompt": [SECRET, {}]}, KEY, 400, "prompt"),
        ("/v1/completions", {"prompt": SECRET}, "", 401, "authorization: expected an API key"),
        ("/v1/completion", {"prompt": SECRET}, KEY, 404, "Not Found"),
        ("/v1/completions", {"prompt": SECRET * 1000}, KEY, 413, "body="),
    ]
    for path, body, key, _, _ in refused:
        one = await running.peer.make_neighbour()
        await one.post(path, body, key)
        await one.read_answer()
    await running.peer.say(b"\x00no http\r\n\r\n")  # what never becomes a request has a line too
    await running.peer.read_answer()
    lines = await read_lines(running, capfd)
    assert [line["path"] for line in lines] == [path for path, *_ in refused] + ["-"]
    assert {line["level"] for line in lines} == {"WARNING"}
    for line, (*_, status, cause) in zip(
        lines, [*refused, (400, "request: expected valid HTTP/1.1")], strict=True
    ):
        assert line["status"] == status
        assert line["cause"].startswith(cause)
    assert SECRET not in str(lines)


async def test_a_request_whose_client_leaves_is_a_499(
    running: RunningServer, capfd: pytest.CaptureFixture[str]
) -> None:
    running.llm.gate.clear()
    gone = await running.peer.make_neighbour()
    await gone.post("/v1/completions", {"prompt": "a"}, KEY)
    await running.llm.started.wait()
    gone.leave()
    await running.llm.wait_for_calls(1, 1)
    (line,) = await read_lines(running, capfd)
    assert line["status"] == 499


@pytest.mark.parametrize(
    ("options", "paths"),
    [
        ({}, ["/live", "/live/x", "/v1/models"]),
        ({"unlogged_paths": ("/live", "/v1/models")}, ["/live/x", "/v1/models"]),
        ({"log_level": "WARNING"}, ["/live/x", "/v1/models"]),
        ({"log_level": "ERROR"}, []),
        ({"has_access_log": False}, []),
    ],
)
async def test_what_is_logged_is_the_operators_to_say(
    options: dict[str, Any], paths: list[str], open_server: OpenServer, capfd: pytest.CaptureFixture[str]
) -> None:
    running = await open_server(**HOW | {"options": LOGGED | options})
    peer = running.peer
    assert await peer.ask_live()
    await peer.say(b"GET /live/x HTTP/1.1\r\nhost: localhost\r\n" + KEY.encode() + b"\r\n")
    assert (await peer.read_answer())[0] == 404
    await peer.say(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert (await peer.read_answer())[0] == 401
    assert [line["path"] for line in await read_lines(running, capfd)] == paths


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
    assert re.search(r"Z GET /v1/x 200 [0-9.]+ ms client=::1$", plain)
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
