"""`quire bench serve` against `quire serve`: the client counts what the server was asked to generate."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

QUIRE = [sys.executable, "-m", "quire"]
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def base_url() -> Iterator[str]:
    """Where a server of the pocket model listens."""
    command = [*QUIRE, "serve", "--port", "0", "--log-level", "WARNING"]
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    found = next(
        (match for line in server.stdout if (match := re.search(r"http://127\.0\.0\.1:\d+", line))), None
    )
    try:
        assert found, "the server has ended"
        yield found[0]
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=TIMEOUT_S)


@pytest.mark.parametrize(
    ("endpoint", "load"),
    [("chat", ["--max-concurrency", "4"]), ("completions", ["--request-rate", "50"])],
)
def test_every_token_that_was_asked_for_is_counted(
    endpoint: str, load: list[str], base_url: str, tmp_path: Path
) -> None:
    report = tmp_path / "out.json"
    options = ["--num-prompts", "10", "--input-len", "5-9", "--output-len", "12", "--ignore-eos"]
    options += ["--goodput", "e2e:60000", "--json", str(report)]
    done = subprocess.run(
        [*QUIRE, "bench", "serve", "--base-url", base_url, "--endpoint", endpoint, *load, *options],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert (done.returncode, done.stderr) == (0, "")
    figures: dict[str, Any] = json.loads(report.read_text())
    assert (figures["model_id"], figures["completed"], figures["failed"]) == ("pocket", 10, 0)
    assert figures["output_lens"] == [12] * 10
    assert all(length >= 5 for length in figures["input_lens"])
    assert figures["request_goodput"] == figures["request_throughput"]
    assert 0 < figures["mean_ttft_ms"] <= figures["mean_e2el_ms"]
