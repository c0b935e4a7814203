"""256 requests of 100 to 1024 tokens in and out (W5): Quire beside vLLM and transformers, where they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ..bench.bench_model import load_bench_model
from ..bench.contest import Job, open_contestants
from ..bench.machine import find_version
from ..bench.peers import TRANSFORMERS, VLLM, default_peer_python, make_launch
from ..bench.workloads import BenchRequest, make_workload, take_sample
from .rows import Row, Say

_WORKLOAD = "W5"
_TIMEOUT_S = 420.0
_SAMPLE = 64  # requests of a batch of transformers', whose cache is copied for every token


def run_contest(
    say: Say,
    device: str = "cuda",
    model: str = "qwen3-0.6b",
    workload: str = _WORKLOAD,
    sample: int = _SAMPLE,
) -> None:
    """Tokens/s of each; a peer that is not installed is said to be missing."""
    peer_python = default_peer_python(VLLM)
    has_vllm = os.access(peer_python, os.X_OK)
    for name, rate in _run_offline(model, device, workload, has_vllm).items():
        say(Row(f"{workload}, {name}", rate))
    if not has_vllm:
        say(Row(f"{workload}, vllm", f"not installed: {peer_python}"))
    say(
        Row(
            f"{workload}, transformers, {sample} requests as a batch",
            _run_transformers(model, device, workload, sample),
        )
    )


def _run_offline(model: str, device: str, workload: str, has_vllm: bool) -> dict[str, str]:
    """By `quire bench offline`: contestant -> its rate, or why it has none."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [
            sys.executable, "-P", "-m", "quire", "bench", "offline", "--model", model, "--workload", workload,
            "--rounds", "1", "--peer", VLLM if has_vllm else "none", "--json", str(report),
            "--engine-arg", f"device={device}",
        ]  # fmt: skip
        done = subprocess.run(command, stdout=sys.stderr, timeout=_TIMEOUT_S)
        if not report.exists():
            raise RuntimeError(f"quire bench offline ended with code {done.returncode} and wrote no figures")
        return _read_rates(json.loads(report.read_text()), workload)


def _read_rates(report: dict[str, Any], workload: str) -> dict[str, str]:
    rates: dict[str, str] = {}
    for name, found in report["workloads"][workload].items():
        rates[name] = found["error"] or f"{found['tokens_per_s']:,.0f} tokens/s"
    return rates


def _run_transformers(name: str, device: str, workload: str, sample: int) -> str:
    """One left-padded batch on random weights of the same shape; tokens that were asked for count."""
    if find_version(TRANSFORMERS) is None:
        return "not installed"
    model = load_bench_model(name)
    work = take_sample(make_workload(workload, model.spec.vocab_size, "round 1"), sample)
    launch = make_launch(TRANSFORMERS, model, work.max_total_len, device=device, ways=["static"])
    with open_contestants({TRANSFORMERS: launch}) as [peer]:
        peer.run(Job(requests=[BenchRequest(work.requests[0].prompt_token_ids, 4)]))
        seconds = peer.run(Job(requests=work.requests)).seconds
    return f"{work.num_output_tokens / seconds:,.0f} tokens/s"
