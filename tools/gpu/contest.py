"""256 requests of 100 to 1024 tokens in and out (W5): Quire beside vLLM and transformers, where they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from ..bench.models import ensure_model
from ..bench.peers import VLLM, default_peer_python
from ..bench.workloads import BenchRequest, make_workload, take_sample
from .rows import Row, Say

_WORKLOAD = "W5"
_TIMEOUT_S = 420.0
_SAMPLE = 64  # requests of a batch of transformers', whose cache is copied for every token
_PAD_TOKEN_ID = 0


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


def _run_transformers(model: str, device: str, workload: str, sample: int) -> str:
    """One left-padded batch on random weights of the same shape; tokens that were asked for count."""
    try:
        import transformers
    except ImportError:
        return "not installed"
    config: Any = transformers.AutoConfig.from_pretrained(ensure_model(model))
    peer: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    peer.to(device).eval()
    work = take_sample(make_workload(workload, config.vocab_size, "round 1"), sample)
    _generate(peer, work.requests[:1], device, most=4)
    seconds = _generate(peer, work.requests, device)
    return f"{work.num_output_tokens / seconds:,.0f} tokens/s"


def _generate(peer: Any, requests: list[BenchRequest], device: str, most: int | None = None) -> float:
    longest = max(len(request.prompt_token_ids) for request in requests)
    pads = [longest - len(request.prompt_token_ids) for request in requests]
    rows = [[_PAD_TOKEN_ID] * pad + one.prompt_token_ids for pad, one in zip(pads, requests, strict=True)]
    mask = [[0] * pad + [1] * (longest - pad) for pad in pads]
    count = most or max(request.num_output_tokens for request in requests)
    start = time.perf_counter()
    with torch.inference_mode():
        output = peer.generate(
            torch.tensor(rows, device=device), attention_mask=torch.tensor(mask, device=device),
            max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None,
            pad_token_id=_PAD_TOKEN_ID,
        )  # fmt: skip
    output.cpu()  # waits for the device
    return time.perf_counter() - start
