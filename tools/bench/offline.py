"""`quire bench offline`: Quire and its peers on the same workloads, side by side in one run.

Every contestant is a process of its own, loaded one after the other. A round runs one workload on all of
them in turn; rounds repeat with new contents, and the table shows medians. Loads no torch itself.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...ipc.errors import InputError
from .ceilings import MEMORY_READ_BYTES, MachineRates, measure_rates
from .contest import Contestant, ContestError, Job
from .machine import describe_machine, format_machine
from .measurement import QUIRE, Measurement, Measurements
from .model_configs import BENCH_MODELS, DUMMY_MODELS, GGUF_MODELS
from .model_facts import ModelFacts, quantize_facts, read_gguf_facts, read_model_facts
from .offline_report import OfflineReport
from .peers import (
    LLAMA,
    TRANSFORMERS_MODES,
    VLLM,
    BenchModel,
    Launch,
    check_peers,
    default_peer_python,
    make_launch,
)
from .workloads import CPU_WORKLOADS, GPU_WORKLOADS, Workload, cut_outputs, make_workload, take_sample

# transformers' `generate` one by one has the same rate for a sample of the requests as for all of them, so
# it gets a sample of about this many tokens; the other modes need the whole batch and run whole.
_SEQUENTIAL_TOKENS = {True: 1024, False: 256}  # by whether the model is light
_LIGHT_PARAMS = 50_000_000
# A mode of transformers whose round takes longer gets that one round only, and a mark: its rate is far
# from Quire's anyway.
_SLOW_ROUND_S = 15.0
_HEAVY_WARM_UP_TOKENS = 4  # outputs of a heavy model's warm-up: its shapes matter, its length does not
# A model smaller than this stays in the caches: its floor says little, and stands there only when asked for.
_MIN_MODEL_SIZE_BYTES = 256 * 2**20
_TORCH_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


@dataclass(frozen=True, slots=True)
class OfflineOptions:
    """What `quire bench offline` was asked for. No workloads: those that fit the model."""

    model: str = "tiny"
    workloads: tuple[str, ...] = ()
    peers: tuple[str, ...] = tuple(TRANSFORMERS_MODES)
    peer_python: Path = field(default_factory=default_peer_python)
    rounds: int = 3
    is_roofline: bool = False
    json_path: str | None = None
    engine_args: dict[str, Any] = field(default_factory=dict[str, Any])


def run_offline(options: OfflineOptions) -> int:
    """Run and print everything; returns 0, or 1 if Quire failed on a workload."""
    peer_versions = check_peers(options.peers, options.peer_python)
    facts = load_model_facts(options.model)
    quantization = options.engine_args.get("quantization")
    if quantization is not None:
        facts = quantize_facts(facts, quantization)
    workloads = {name: make_workload(name, facts.vocab_size, "") for name in _choose_workloads(options)}
    machine = describe_machine()
    if peer_versions:
        machine["peers"] = ", ".join(f"{name} {version}" for name, version in peer_versions.items())
    print(format_machine(machine))
    print(
        f"model     {facts.name}: {facts.num_params / 1e6:,.2f} M parameters, {facts.dtype}, {facts.folder}\n"
    )
    launches = _make_launches(options, facts, workloads)
    rates = _measure_rates_if_useful(options, facts)
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as logs:
        contestants = _start_contestants(launches, Path(logs))
        try:
            measurements = _run_rounds(options, facts, workloads, contestants)
        finally:
            for contestant in contestants:
                contestant.close()
    report = OfflineReport(
        facts=facts,
        workloads=workloads,
        peers=options.peers,
        rounds=options.rounds,
        measurements=measurements,
        rates=_take_better(rates, _measure_rates_if_useful(options, facts)),
        processes={c.name: (c.ready_s, c.rss_bytes) for c in contestants},
    )
    print(report.format(is_roofline=options.is_roofline))
    if options.json_path:
        Path(options.json_path).write_bytes(report.encode(machine))
    return int(any(by_name[QUIRE].rate is None for by_name in measurements.values()))


def load_model_facts(model: str) -> ModelFacts:
    """Facts of a bench model (written on first use), 'pocket', a folder or a GGUF file. Raises InputError."""
    if model in BENCH_MODELS or model in DUMMY_MODELS:
        command = [sys.executable, "-m", "quire.tools.bench.models", model]
        out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        return read_model_facts(model, Path(out.strip().splitlines()[-1]), is_dummy=model in DUMMY_MODELS)
    if model in GGUF_MODELS:
        command = [sys.executable, "-m", "quire.tools.bench.gguf_models", model]
        out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        return read_gguf_facts(Path(out.strip().splitlines()[-1]))
    folder = Path(__file__).parents[1] / "pocket" / "model" if model == "pocket" else Path(model)
    if folder.suffix == ".gguf" and folder.is_file():
        return read_gguf_facts(folder.resolve())
    try:
        return read_model_facts(folder.name if model != "pocket" else model, folder)
    except (OSError, ValueError, KeyError) as error:
        names = ", ".join((*BENCH_MODELS, *DUMMY_MODELS, *GGUF_MODELS))
        allowed = f"{names}, pocket, a folder with config.json and safetensors, or a GGUF file"
        raise InputError("model", model, f"{allowed} ({error})") from None


def _choose_workloads(options: OfflineOptions) -> tuple[str, ...]:
    return options.workloads or (GPU_WORKLOADS if options.model in DUMMY_MODELS else CPU_WORKLOADS)


def _make_launches(
    options: OfflineOptions, facts: ModelFacts, workloads: dict[str, Workload]
) -> dict[str, Launch]:
    """Contestant -> how it is started. Raises InputError when a peer cannot load the model."""
    max_model_len = max(workload.max_total_len for workload in workloads.values())
    model = BenchModel(facts.folder, max_model_len, facts.is_dummy)
    engine_args: dict[str, Any] = {"max_model_len": max_model_len}
    if facts.is_dummy:
        engine_args["load_format"] = "dummy"
        if any(peer in TRANSFORMERS_MODES for peer in options.peers):
            raise InputError("peer", "transformers", f"{VLLM} or none: {facts.name} has no weights to load")
    for peer in options.peers:
        if facts.is_gguf and peer != LLAMA:
            raise InputError("peer", peer, f"{LLAMA} or none: {facts.name} is a GGUF file")
        if peer == LLAMA and not facts.is_gguf:
            raise InputError("peer", peer, f"with --model FILE.gguf: {facts.name} is none")
    arguments = json.dumps(engine_args | options.engine_args)
    module = f"{__package__}.quire_engine"
    launches = {QUIRE: Launch([sys.executable, "-m", module, str(facts.folder), arguments])}
    return launches | {peer: make_launch(peer, model, options.peer_python) for peer in options.peers}


def _start_contestants(launches: dict[str, Launch], logs: Path) -> list[Contestant]:
    """One after the other, so that each one's load time is its own."""
    started: list[Contestant] = []
    try:
        for name, launch in launches.items():
            _say(f"loading {name}")
            started.append(Contestant(name, launch.command, str(logs / f"{name}.log"), launch.environment))
            started[-1].wait_until_ready()
    except BaseException:
        for contestant in started:
            contestant.close()
        raise
    return started


def _run_rounds(
    options: OfflineOptions, facts: ModelFacts, workloads: dict[str, Workload], contestants: list[Contestant]
) -> Measurements:
    measurements: Measurements = defaultdict(lambda: defaultdict(Measurement))
    is_light = facts.num_params < _LIGHT_PARAMS
    for name, workload in workloads.items():
        for round_number in range(options.rounds + 1):  # round 0 warms up
            is_warm_up = round_number == 0
            contents = make_workload(name, facts.vocab_size, f"round {round_number}")
            if is_warm_up and not is_light:
                contents = cut_outputs(contents, _HEAVY_WARM_UP_TOKENS)
            for contestant in contestants:
                _say(f"{name} {'warm-up' if is_warm_up else f'round {round_number}'}: {contestant.name}")
                measurement = measurements[name][contestant.name]
                measurement.num_requests_of = len(workload.requests)
                if contestant.name in TRANSFORMERS_MODES and measurement.last_seconds > _SLOW_ROUND_S:
                    continue
                job = _make_job(contestant.name, contents, is_light)
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


def _make_job(contestant: str, workload: Workload, is_light: bool) -> Job:
    """The workload, or the sample of it that this contestant runs."""
    if contestant == "transformers-sequential":
        share = _SEQUENTIAL_TOKENS[is_light] / workload.num_output_tokens
        count = max(1, round(share * len(workload.requests)))
        workload = take_sample(workload, min(count, len(workload.requests)))
    return Job(requests=workload.requests)


def _measure_rates_if_useful(options: OfflineOptions, facts: ModelFacts) -> MachineRates | None:
    """The rates for this model's steps: a block of their size is read, from memory or from a cache."""
    if facts.size.step_bytes < _MIN_MODEL_SIZE_BYTES and not options.is_roofline:
        return None
    _say("measuring read bandwidth and matrix rate")
    device = str(options.engine_args.get("device", "auto"))
    size_bytes = min(facts.size.step_bytes, MEMORY_READ_BYTES)
    rates = measure_rates(device, _TORCH_DTYPES.get(facts.dtype, "bfloat16"), size_bytes)
    _say("")
    return rates


def _take_better(before: MachineRates | None, after: MachineRates | None) -> MachineRates | None:
    """The best of both: a floor is what the machine can do, and its bandwidth comes and goes."""
    if before is None or after is None:
        return None
    return MachineRates(
        read_bytes_per_s=max(before.read_bytes_per_s, after.read_bytes_per_s),
        flops_per_s=max(before.flops_per_s, after.flops_per_s),
        device=before.device,
    )


def _say(text: str) -> None:
    """Progress on stderr: over itself on a terminal, else a line each."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)
