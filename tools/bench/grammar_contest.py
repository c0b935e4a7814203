"""`quire bench grammar --peer vllm`: what a JSON schema costs Quire and vLLM, in one run.

Two figures a model, each with schemas and without: tokens/s of its workload, and the time to the first token
of one request on an idle engine, to which its schema is new. Each round has other contents and another order.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from .contest import Contestant, Job
from .grammar import NUM_SCHEMAS, WORKLOAD_OF, make_folder, make_schema
from .machine import describe_machine, format_machine
from .measurement import QUIRE
from .model_configs import BENCH_MODELS
from .peers import VLLM, BenchModel, Launch, check_peers, make_vllm_launch
from .table import format_rate, format_table
from .workloads import cut_outputs, make_workload

_HEADER = ["", "quire", "with schemas", "vllm", "with schemas", "quire/vllm", "with schemas"]
MakeJob = Callable[[str, bool], Job]
Rates = dict[tuple[str, bool], list[float]]  # by contestant and whether there are schemas


def run_grammar_contest(models: list[str], num_rounds: int, peer_python: Path) -> int:
    """Measure and print; returns 0. Raises ContestError, and InputError for an unusable peer."""
    versions = check_peers((VLLM,), peer_python)
    machine = describe_machine() | {"peers": ", ".join(f"{name} {one}" for name, one in versions.items())}
    print(format_machine(machine) + "\n")
    rows: list[list[str]] = []
    for model in models:
        with tempfile.TemporaryDirectory(prefix="quire-bench-") as scratch:
            rows += _measure(model, Path(scratch), num_rounds, peer_python)
    print("\n" + format_table(_HEADER, rows))
    return 0


def _measure(model: str, scratch: Path, num_rounds: int, peer_python: Path) -> list[list[str]]:
    """The rows of a model."""
    name, vocab_size = WORKLOAD_OF[model], BENCH_MODELS[model]["vocab_size"]
    folder = make_folder(model, scratch)
    max_model_len = make_workload(name, vocab_size, "").max_total_len
    engine_args = json.dumps({"max_model_len": max_model_len, "skip_tokenizer_init": False})
    launches = {
        QUIRE: Launch([sys.executable, "-m", f"{__package__}.quire_engine", str(folder), engine_args]),
        VLLM: make_vllm_launch(BenchModel(folder, max_model_len, has_tokenizer=True), peer_python),
    }

    def make_full(contents: str, has_schemas: bool) -> Job:
        requests = make_workload(name, vocab_size, contents).requests
        return Job(requests=requests, json_schemas=_list_schemas("shared", has_schemas), temperature=1.0)

    def make_short(contents: str, has_schemas: bool) -> Job:
        requests = cut_outputs(make_workload(name, vocab_size, contents), 1).requests[:1]
        return Job(requests=requests, json_schemas=_list_schemas(contents, has_schemas), temperature=1.0)

    contestants: list[Contestant] = []
    try:
        for contestant, launch in launches.items():
            log = str(scratch / f"{contestant}.log")
            contestants.append(Contestant(contestant, launch.command, log, launch.environment))
            contestants[-1].wait_until_ready()
        full = _run_rounds(contestants, make_full, num_rounds)
        short = _run_rounds(contestants, make_short, num_rounds)
    finally:
        for contestant in contestants:
            contestant.close()
    return [
        _format_row(f"{model}, {name}, tokens/s", full, is_time=False),
        _format_row(f"{model}, first token, ms", short, is_time=True),
    ]


def _list_schemas(title: str, has_schemas: bool) -> list[str]:
    if not has_schemas:
        return []
    return [json.dumps(make_schema(f"{title} {number}")) for number in range(NUM_SCHEMAS)]


def _run_rounds(contestants: list[Contestant], make_job: MakeJob, num_rounds: int) -> Rates:
    """Tokens/s of every round but the first, which warms up."""
    rates: Rates = {}
    for number in range(1 + num_rounds):
        for has_schemas in (False, True) if number % 2 else (True, False):
            job = make_job(f"round {number} {has_schemas}", has_schemas)
            for contestant in contestants if number % 4 < 2 else contestants[::-1]:
                rate = job.num_output_tokens / contestant.run(job).seconds
                rates.setdefault((contestant.name, has_schemas), []).append(rate)
    return {key: found[1:] for key, found in rates.items()}


def _format_row(title: str, rates: Rates, *, is_time: bool) -> list[str]:
    """Medians, and the median over the rounds of how many times as fast Quire is."""
    cells: list[str] = []
    for contestant in (QUIRE, VLLM):
        for has_schemas in (False, True):
            rate = statistics.median(rates[contestant, has_schemas])
            cells.append(format_rate(1e3 / rate if is_time else rate))
    for has_schemas in (False, True):
        pairs = zip(rates[QUIRE, has_schemas], rates[VLLM, has_schemas], strict=True)
        cells.append(f"{statistics.median(ours / theirs for ours, theirs in pairs):.2f}")
    return [title, *cells]
