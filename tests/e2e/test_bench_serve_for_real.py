"""`quire bench serve` against `quire serve`: the client counts what the server was asked to generate."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from served import Served

QUIRE = [sys.executable, "-m", "quire"]
TIMEOUT_S = 60.0


@pytest.mark.parametrize(
    ("endpoint", "load"), [("chat", ["--max-concurrency", "4"]), ("completions", ["--request-rate", "50"])]
)
def test_every_token_that_was_asked_for_is_counted(
    endpoint: str, load: list[str], shared_server: Served, tmp_path: Path
) -> None:
    report = tmp_path / "out.json"
    options = ["--num-prompts", "10", "--input-len", "5-9", "--output-len", "12", "--ignore-eos"]
    options += ["--goodput", "e2e:60000", "--json", str(report)]
    options += ["--api-key", shared_server.api_key]
    done = subprocess.run(
        [*QUIRE, "bench", "serve", "--base-url", shared_server.url, "--endpoint", endpoint, *load, *options],
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
