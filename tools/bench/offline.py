"""`quire bench offline`: Quire and its peers on the same workloads, side by side in one run.

Every contestant is a process of its own, loaded one after the other. A round runs one workload on all of
them in turn; rounds repeat with new contents, and the table shows medians. Loads no torch itself.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ...ipc.errors import InputError
from .contest import Contestant, ContestError, Job, JobResult
from .floors import MIN_MODEL_SIZE_BYTES, MachineRates, compute_floor_s, measure_rates
from .machine import describe_machine, find_version, format_machine
from .model_facts import ModelFacts, read_model_facts
from .table import format_megabytes, format_rate, format_table
from .workloads import SHARED_PREFIX_LEN, WORKLOADS, Workload, make_workload

QUIRE = "quire"
PEERS = {
    "transformers-sequential": "sequential",
    "transformers-static": "static",
    "transformers-continuous": "continuous",
}
# transformers' `generate` one by one has the same rate for a sample of the requests as for all of them, so
# it gets a sample of about this many tokens; the other modes need the whole batch and run whole.
_SEQUENTIAL_TOKENS = {True: 1024, False: 256}  # by whether the model is light
_LIGHT_PARAMS = 50_000_000
# A peer whose round takes longer gets that one round only, and a mark: its rate is far from Quire's anyway.
_SLOW_ROUND_S = 15.0
_HEAVY_WARM_UP_TOKENS = 4  # outputs of a heavy model's warm-up: its shapes matter, its length does not


@dataclass(frozen=True, slots=True)
class OfflineOptions:
    """What `quire bench offline` was asked for."""

    model: str = "tiny"
    workloads: tuple[str, ...] = tuple(WORKLOADS)
    peers: tuple[str, ...] = tuple(PEERS)
    rounds: int = 3
    json_path: str | None = None
    engine_args: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(slots=True)
class Measurement:
    """All rounds of one contestant on one workload."""

    results: list[JobResult] = field(default_factory=list[JobResult])
    num_requests_of: int = 0  # the workload's; more than a result's when a sample was run
    error: str | None = None

    @property
    def rate(self) -> float | None:
        """Median generated tokens per second; None without a result."""
        if not self.results:
            return None
        return statistics.median(r.num_output_tokens / r.seconds for r in self.results)

    @property
    def is_sample(self) -> bool:
        """True if only some of the requests were run."""
        return bool(self.results) and self.results[0].num_requests < self.num_requests_of

    @property
    def is_slow(self) -> bool:
        """True if a round took so long that a peer need not run another."""
        return bool(self.results) and self.results[-1].seconds > _SLOW_ROUND_S


Measurements = dict[str, dict[str, Measurement]]  # workload -> contestant -> measurement


def run_offline(options: OfflineOptions) -> int:
    """Run and print everything; returns 0, or 1 if Quire failed on a workload."""
    facts = load_model_facts(options.model)
    machine = describe_machine()
    print(format_machine(machine))
    print(
        f"model     {facts.name}: {facts.num_params / 1e6:,.2f} M parameters, {facts.dtype}, {facts.folder}\n"
    )
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as logs:
        contestants = _start_contestants(options, facts, Path(logs))
        try:
            measurements = _run_rounds(options, facts, contestants)
        finally:
            for contestant in contestants:
                contestant.close()
    rates = _measure_rates_if_useful(facts)
    print(format_results(options, facts, measurements, rates))
    print("\n" + format_processes(contestants))
    for line in describe_prefix_reuse(measurements):
        print(line)
    if options.json_path:
        _write_json(options, machine, facts, measurements, contestants, rates)
    return int(any(by_name[QUIRE].rate is None for by_name in measurements.values()))


def load_model_facts(model: str) -> ModelFacts:
    """Facts of 'tiny', 'small' (written on first use), 'pocket', or a folder. Raises InputError."""
    if model in ("tiny", "small"):
        command = [sys.executable, "-m", "quire.tools.bench.models", model]
        out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        return read_model_facts(model, Path(out.strip().splitlines()[-1]))
    folder = Path(__file__).parents[1] / "pocket" / "model" if model == "pocket" else Path(model)
    try:
        return read_model_facts(folder.name if model != "pocket" else model, folder)
    except (OSError, ValueError, KeyError) as error:
        allowed = "tiny, small, pocket, or a folder with config.json and safetensors"
        raise InputError("model", model, f"{allowed} ({error})") from None


def _start_contestants(options: OfflineOptions, facts: ModelFacts, logs: Path) -> list[Contestant]:
    """One after the other, so that each one's load time is its own."""
    here = __package__ or ""
    common = [str(facts.folder), str(facts.vocab_size)]
    commands = {QUIRE: (f"{here}.quire_engine", [*common, json.dumps(options.engine_args)])}
    for peer in options.peers:
        commands[peer] = (f"{here}.transformers_engine", [PEERS[peer], *common])
    if options.peers and find_version("transformers") is None:
        raise InputError(
            "peer", options.peers[0], "needs transformers: pip install transformers, or --peer none"
        )
    started: list[Contestant] = []
    try:
        for name, (module, arguments) in commands.items():
            _say(f"loading {name}")
            started.append(Contestant(name, module, arguments, str(logs / f"{name}.log")))
            started[-1].wait_until_ready()
    except BaseException:
        for contestant in started:
            contestant.close()
        raise
    return started


def _run_rounds(options: OfflineOptions, facts: ModelFacts, contestants: list[Contestant]) -> Measurements:
    measurements: Measurements = defaultdict(lambda: defaultdict(Measurement))
    is_light = facts.num_params < _LIGHT_PARAMS
    for name in options.workloads:
        workload = make_workload(name, facts.vocab_size, "")
        for round_number in range(options.rounds + 1):  # round 0 warms up
            is_warm_up = round_number == 0
            for contestant in contestants:
                _say(f"{name} {'warm-up' if is_warm_up else f'round {round_number}'}: {contestant.name}")
                measurement = measurements[name][contestant.name]
                measurement.num_requests_of = len(workload.requests)
                job = Job(
                    workload=name,
                    contents=f"round {round_number}",
                    num_requests=_choose_sample(contestant.name, workload, is_light),
                    max_output_tokens=_HEAVY_WARM_UP_TOKENS if is_warm_up and not is_light else None,
                )
                if contestant.name == QUIRE or not measurement.is_slow:
                    _run_job(contestant, job, measurement, is_warm_up)
    _say("")
    return measurements


def _run_job(contestant: Contestant, job: Job, measurement: Measurement, is_warm_up: bool) -> None:
    if measurement.error is not None:
        return
    try:
        result = contestant.run(job)
    except ContestError as error:
        measurement.error = str(error)
        return
    if not is_warm_up:
        measurement.results.append(result)


def _choose_sample(contestant: str, workload: Workload, is_light: bool) -> int | None:
    """How many requests this contestant runs, None for all."""
    if contestant != "transformers-sequential":
        return None
    share = _SEQUENTIAL_TOKENS[is_light] / workload.num_output_tokens
    count = max(1, round(share * len(workload.requests)))
    return count if count < len(workload.requests) else None


def _measure_rates_if_useful(facts: ModelFacts) -> MachineRates | None:
    if facts.size.step_bytes < MIN_MODEL_SIZE_BYTES:
        return None
    _say("measuring read bandwidth and matrix rate")
    rates = measure_rates()
    _say("")
    return rates


def format_results(
    options: OfflineOptions, facts: ModelFacts, measurements: Measurements, rates: MachineRates | None
) -> str:
    """The table of rates with Quire's ratio to the best peer, its floor, and what the labels mean."""
    names = [QUIRE, *options.peers]
    header = ["generated tokens/s", *names, *(["quire / best peer"] if options.peers else [])]
    header += ["floor allows", "quire of it"] if rates else []
    rows: list[list[str]] = []
    for name in options.workloads:
        by_name = measurements[name]
        own = by_name[QUIRE].rate
        row = [
            f"{name} {WORKLOADS[name].summary}",
            *(_format_measurement(by_name[n], options.rounds) for n in names),
        ]
        if options.peers:
            best = max((by_name[peer].rate or 0.0 for peer in options.peers), default=0.0)
            row.append(f"{own / best:.2f}x" if own and best else "-")
        if rates:
            ceiling = _compute_ceiling(name, facts, rates)
            row += [format_rate(ceiling), f"{own / ceiling:.0%}" if own else "-"]
        rows.append(row)
    notes = [
        f"medians of {options.rounds} rounds after a warm-up of the same shapes with other contents; "
        "greedy, EOS ignored, token ids in and out",
    ]
    if any(m.is_sample for by_name in measurements.values() for m in by_name.values()):
        notes.append("* measured on an even sample of the requests (one at a time, so the rate is the same)")
    if any(
        0 < len(m.results) < options.rounds for by_name in measurements.values() for m in by_name.values()
    ):
        notes.append(f"' one round only, because it took longer than {_SLOW_ROUND_S:.0f} s")
    if rates:
        notes.append(
            f"floor: weights read at {rates.read_bytes_per_s / 1e9:.1f} GB/s and "
            f"{rates.bf16_flops_per_s / 1e9:,.0f} GFLOP/s bf16, both measured now; attention not counted"
        )
    for name, by_name in measurements.items():
        notes += [f"{name} {who} failed: {m.error}" for who, m in by_name.items() if m.error]
    return format_table(header, rows) + "\n" + "\n".join(notes)


def _compute_ceiling(name: str, facts: ModelFacts, rates: MachineRates) -> float:
    workload = make_workload(name, facts.vocab_size, "")
    has_prefix = WORKLOADS[name].shared_prefix_len > 0
    return workload.num_output_tokens / compute_floor_s(workload, facts.size, rates, has_prefix)


def _format_measurement(measurement: Measurement, rounds: int) -> str:
    rate = measurement.rate
    if rate is None:
        return "failed" if measurement.error else "-"
    is_cut = len(measurement.results) < rounds
    return format_rate(rate) + ("*" if measurement.is_sample else "") + ("'" if is_cut else "")


def format_processes(contestants: list[Contestant]) -> str:
    """Load time and memory of every contestant's processes, at their largest after a job."""
    rows = [
        [contestant.name, role, f"{contestant.ready_s:.2f}", format_megabytes(size)]
        for contestant in contestants
        for role, size in contestant.rss_bytes.items()
    ]
    return format_table(["contestant", "process", "ready after s", "RSS MB"], rows)


def describe_prefix_reuse(measurements: Measurements) -> list[str]:
    """Whether Quire computed W3's shared prefix once, by the cached tokens that its outputs report."""
    measurement = measurements["W3"][QUIRE] if "W3" in measurements else Measurement()
    if not measurement.results:
        return []
    expected = (measurement.num_requests_of - 1) * SHARED_PREFIX_LEN
    found = [result.num_cached_tokens or 0 for result in measurement.results]
    verdict = "computed once" if min(found) >= expected else "NOT computed once"
    shown = ", ".join(f"{count:,}" for count in found)
    return [f"\nW3 prefix {verdict}: {shown} prompt tokens came from the cache, {expected:,} could"]


def _write_json(
    options: OfflineOptions,
    machine: dict[str, str],
    facts: ModelFacts,
    measurements: Measurements,
    contestants: list[Contestant],
    rates: MachineRates | None,
) -> None:
    report = {
        "machine": machine,
        "model": {"name": facts.name, "num_params": facts.num_params, "dtype": facts.dtype},
        "rates": rates,
        "workloads": {
            name: {
                who: {"tokens_per_s": m.rate, "is_sample": m.is_sample, "error": m.error, "rounds": m.results}
                for who, m in by_name.items()
            }
            for name, by_name in measurements.items()
        },
        "processes": {c.name: {"ready_s": c.ready_s, "rss_bytes": c.rss_bytes} for c in contestants},
    }
    assert options.json_path is not None
    Path(options.json_path).write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")


def _say(text: str) -> None:
    """Progress on stderr: over itself on a terminal, else a line each."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)
