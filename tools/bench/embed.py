"""`quire bench embed`: texts to vectors by Quire and its peers, side by side in one run.

Every contestant is a process of its own and gets all texts in one call. A round asks all of them in turn; the
table shows medians. Loads no torch itself.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .ceilings import measure_rates
from .contest import Contestant, Job
from .encoder_models import count_tokens, make_encoder_size, make_texts
from .machine import describe_machine, format_machine
from .measurement import QUIRE
from .peers import Launch, check_embed_peers, make_embed_launch
from .table import format_megabytes, format_rate, format_table

_NUM_TEXTS = 256
SHORTEST, LONGEST = 16, 256  # tokens of a text


@dataclass(frozen=True, slots=True)
class EmbedOptions:
    """What `quire bench embed` was asked for."""

    models: tuple[str, ...]
    dtypes: tuple[str, ...]
    peers: tuple[str, ...]
    pythons: Mapping[str, Path]  # of the peers
    rounds: int


def run_embed(options: EmbedOptions) -> int:
    """Measure and print; returns 0. Raises ContestError, and InputError for an unusable peer."""
    versions = check_embed_peers(options.peers, options.pythons)
    machine = describe_machine()
    if versions:
        machine["peers"] = ", ".join(f"{name} {one}" for name, one in versions.items())
    print(format_machine(machine) + "\n")
    header = ["", *(f"{name}, texts/s" for name in (QUIRE, *options.peers))]
    header += [*(f"quire/{peer}" for peer in options.peers), "of the floor", "ready, s", "RSS MB"]
    rows = [_measure(model, dtype, options) for model in options.models for dtype in options.dtypes]
    print(format_table(header, rows))
    return 0


def _measure(model: str, dtype: str, options: EmbedOptions) -> list[str]:
    """The row of a model in a number format."""
    folder = ensure_folder(model)
    arguments = json.dumps({"dtype": dtype, "skip_tokenizer_init": False})
    command = [sys.executable, "-m", f"{__package__}.quire_engine", str(folder), arguments]
    launches = {QUIRE: Launch(command)}
    launches |= {
        peer: make_embed_launch(peer, folder, dtype, options.pythons[peer]) for peer in options.peers
    }
    contestants: list[Contestant] = []
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as logs:
        try:
            for name, launch in launches.items():
                print(f"{model} {dtype}: loading {name}", file=sys.stderr)
                contestants.append(Contestant(name, launch.command, f"{logs}/{name}.log", launch.environment))
                contestants[-1].wait_until_ready()
            seconds = _run_rounds(model, contestants, options.rounds)
        finally:
            for contestant in contestants:
                contestant.close()
    floor_s = compute_floor_s(model, dtype, _NUM_TEXTS)
    ours = seconds[QUIRE]
    return [
        f"{model}, {dtype}",
        *(format_rate(_NUM_TEXTS / statistics.median(found)) for found in seconds.values()),
        *(format_ratio(ours, seconds[peer]) for peer in options.peers),
        f"{floor_s / statistics.median(ours):.0%}",
        f"{contestants[0].ready_s:.2f}",
        format_megabytes(sum(contestants[0].rss_bytes.values())),
    ]


def ensure_folder(model: str) -> Path:
    """The encoder's folder, written by a process that loads torch."""
    command = [sys.executable, "-m", f"{__package__}.encoder_models", model]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return Path(out.strip().splitlines()[-1])


def _run_rounds(model: str, contestants: list[Contestant], num_rounds: int) -> dict[str, list[float]]:
    """Seconds of every round but the first, which warms up, by contestant."""
    seconds: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    for number in range(1 + num_rounds):
        texts = make_texts(model, _NUM_TEXTS, SHORTEST, LONGEST, f"round {number}")
        for contestant in contestants if number % 2 else contestants[::-1]:
            result = contestant.run(Job(texts=texts))
            if number:
                seconds[contestant.name].append(result.seconds)
    return seconds


def compute_floor_s(model: str, dtype: str, num_texts: int) -> float:
    """The operations of so many texts over the machine's matrix rate."""
    size = make_encoder_size(model, dtype)
    lengths = [count_tokens(text) for text in make_texts(model, num_texts, SHORTEST, LONGEST, "")]
    flops = 2 * size.num_layer_params * sum(lengths)
    flops += size.attention_flops_per_key * sum(length * length for length in lengths)
    return flops / measure_rates("cpu", dtype, size.step_bytes).flops_per_s


def format_ratio(ours: list[float], theirs: list[float]) -> str:
    """How many times as fast Quire is, the median over the rounds."""
    ratios = [their / our for our, their in zip(ours, theirs, strict=True)]
    return f"{statistics.median(ratios):.2f}"
