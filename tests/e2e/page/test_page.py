"""The page, the live view and /metrics of a real server over the pocket model; the page in a real browser."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from quire.ipc.protocol.engine_views import EngineSnapshot

FOLDER = Path(__file__).parent
DEADLINE_S = 60.0
DRIVE_S = 600.0  # of a script; each of its waits has a shorter deadline
MAX_MODEL_LEN = (
    65_536  # of the pocket model, which writes nonsense then: an answer that nobody ends takes minutes
)
LONG = {"model": "pocket", "prompt": "Once", "max_tokens": 1900, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A server with few rows, so that requests wait, and long answers; it ends by SIGTERM with code 0."""
    command = [
        sys.executable,
        "-m",
        "quire",
        "serve",
        "--port",
        "0",
        "--max-num-seqs",
        "8",
        "--drain-timeout",
        "60",
        "--hf-overrides",
        f'{{"max_position_embeddings": {MAX_MODEL_LEN}}}',
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        timer = threading.Timer(DEADLINE_S, server.kill)
        timer.start()
        try:
            assert server.stdout is not None
            found = next(
                filter(None, (re.search(r"page\s+http://127.0.0.1:(\d+)/", line) for line in server.stdout))
            )
            timer.cancel()
            yield int(found[1])
            with open_stream(
                int(found[1]), "GET", "/stats/stream"
            ) as events:  # an open page holds nothing up
                next(events)
                began = time.monotonic()
                server.terminate()
                assert server.wait(DEADLINE_S) == 0
            assert time.monotonic() - began < 10
        finally:
            timer.cancel()
            server.kill()


@contextmanager
def open_stream(port: int, method: str, path: str, body: object = None) -> Generator[Iterator[bytes]]:
    """The data of a response's events; leaving closes the connection."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    try:
        connection.request(method, path, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200
        assert response.getheader("content-type", "").startswith("text/event-stream")
        yield (line[6:].strip() for line in response if line.startswith(b"data: "))
    finally:
        connection.close()


def get(port: int, path: str) -> tuple[http.client.HTTPResponse, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    try:
        connection.request("GET", path, headers={"accept": "text/html"})
        response = connection.getresponse()
        return response, response.read().decode()
    finally:
        connection.close()


def look(port: int) -> EngineSnapshot:
    return msgspec.json.decode(get(port, "/stats")[1], type=EngineSnapshot)


def read_series(port: int) -> dict[str, float]:
    """Series that have no label of their own."""
    families = text_string_to_metric_families(get(port, "/metrics")[1])
    return {
        sample.name: sample.value
        for family in families
        for sample in family.samples
        if not sample.labels.keys() - {"model_name", "engine"}
    }


def test_the_page_comes_with_a_policy_that_its_script_meets(port: int):
    response, page = get(port, "/")
    assert response.status == 200
    policy = response.getheader("content-security-policy", "")
    assert "script-src 'sha256-" in policy
    assert "unsafe" not in policy
    assert "<title>Quire</title>" in page


def test_the_stream_shows_a_request_while_it_runs_and_then_no_more(port: int):
    with open_stream(port, "GET", "/stats/stream") as events:
        assert msgspec.json.decode(next(events), type=EngineSnapshot).requests == []
        with open_stream(port, "POST", "/v1/completions", LONG) as tokens:
            next(tokens)
            snapshots = (msgspec.json.decode(event, type=EngineSnapshot) for event in events)
            running = next(snapshot for snapshot in snapshots if snapshot.requests)
            (view,) = running.requests
            assert view.state == "running"
            assert view.max_total_tokens - view.num_prompt_tokens == 1900
            assert running.stats.kv_blocks_used > 0
            assert any(running.block_map[::2])
        assert next(snapshot for snapshot in snapshots if not snapshot.requests).stats.num_running == 0


def test_requests_beyond_the_rows_wait_and_say_why(port: int):
    with open_stream(port, "POST", "/v1/completions", {**LONG, "n": 12, "temperature": 1.0}) as tokens:
        next(tokens)
        waiting = [view for view in look(port).requests if view.state == "waiting"]
        assert len(waiting) == 4
        assert "max_num_seqs" in waiting[0].waits_for
        assert all(view.waits_for for view in waiting)


def test_a_finished_request_is_in_every_metric_it_belongs_to(port: int):
    before = read_series(port)
    body = {"model": "pocket", "prompt": "Once upon", "max_tokens": 5, "ignore_eos": True, "stream": True}
    with open_stream(port, "POST", "/v1/completions", body) as tokens:
        assert list(tokens)[-1] == b"[DONE]"
    after = read_series(port)
    assert after["quire:generation_tokens_total"] - before["quire:generation_tokens_total"] >= 5
    for name, count in {
        "time_to_first_token_seconds": 1,
        "e2e_request_latency_seconds": 1,
        "request_generation_tokens": 1,
        "inter_token_latency_seconds": 4,
    }.items():
        series = f"quire:{name}_count"
        assert after[series] - before[series] >= count
    assert after["process_resident_memory_bytes"] > 0


@pytest.mark.timeout(DRIVE_S)
def test_the_page_works_in_a_browser(port: int, tmp_path: Path):
    drive("drive.mjs", port, str(tmp_path / "page.png"), needs="playwright-core")
    keep(tmp_path)


@pytest.mark.timeout(DRIVE_S)
def test_the_page_keeps_its_word_whatever_the_server_answers(port: int):
    drive("scripted.mjs", port, needs="playwright-core")


@pytest.mark.timeout(DRIVE_S)
def test_nothing_on_the_page_keeps_people_out_at_any_width_light_or_dark(port: int, tmp_path: Path):
    """`pictures/` holds what this draws, for people to look at; QUIRE_ARTIFACTS gets the new ones."""
    drive("looks.mjs", port, str(tmp_path), needs="axe-core")
    assert len(list(tmp_path.iterdir())) == len(list((FOLDER / "pictures").glob("*.png"))) == 8
    keep(tmp_path)


def drive(script: str, port: int, *arguments: str, needs: str) -> None:
    """Run a script of this folder in Node with the browser; skips where one of them is not there."""
    chromium, node = shutil.which("chromium"), shutil.which("node")
    if chromium is None or node is None:
        pytest.skip("chromium and node are needed: apt-get install chromium nodejs")
    if not (FOLDER / "node_modules" / needs).is_dir():
        pytest.skip(f"{needs} is needed: npm install --prefix {FOLDER}")
    command = [node, str(FOLDER / script), f"http://127.0.0.1:{port}", chromium, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DRIVE_S)
    assert done.returncode == 0, done.stderr


def keep(pictures: Path) -> None:
    """Small pictures, and where CI keeps what people may want to look at."""
    for picture in pictures.iterdir():
        assert picture.stat().st_size < 300_000
        if kept := os.environ.get("QUIRE_ARTIFACTS"):
            shutil.copy(picture, kept)
