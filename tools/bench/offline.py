"""`quire bench offline`: Quire and its peers on the same workloads, side by side in one run.

A round runs one workload on all of them in turn; rounds repeat with new contents, and the table
shows medians. Loads no torch itself.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...frontend.options.engine_args import EngineArgs
from ...ipc.errors import InputError
from ..options import COUNT, option
from .bench_model import BenchModel, load_bench_model, load_spec
from .ceilings import MEMORY_READ_BYTES, MachineRates, measure_rates, take_better
from .contest import Job, Measurement, open_contestants, run_rounds, say
from .cost_model import StepShape, compute_step_work
from .floors import Floor, compute_floor
from .machine import print_machine, write_json
from .model_configs import DUMMY_MODELS
from .peers import NONE, QUIRE, TRANSFORMERS, VLLM, check_peers, choose_peers, make_launch
from .table import format_megabytes, format_rate, format_table
from .workloads import (
    CPU_WORKLOADS,
    GPU_WORKLOADS,
    SHARED_PREFIX_LEN,
    WORKLOADS,
    Workload,
    cut_outputs,
    make_workload,
)

_PEERS = (VLLM, TRANSFORMERS)
_LIGHT_PARAMS = 50_000_000
_HEAVY_WARM_UP_TOKENS = 4  # outputs of a heavy model's warm-up: its shapes matter, its length does not
# A model smaller than this stays in the caches: its floor says little, and stands there only when asked for.
_MIN_MODEL_SIZE_BYTES = 256 * 2**20
_NOTE = (
    "medians of {} rounds after a warm-up of the same shapes with other contents; greedy, EOS ignored, "
    "token ids in and out; each round begins when the other contestants are idle"
)
_SPLIT = "workloads (W1 to W4; W1 and W5 for qwen3-0.6b and llama-8b):\n"
EPILOG = _SPLIT + "".join(f"  {name}  {kind.summary}\n" for name, kind in WORKLOADS.items())
Measurements = Mapping[str, Mapping[str, Measurement]]  # workload -> contestant -> measurement


@dataclass(frozen=True, slots=True)
class Options:
    """Quire and its peers on the same workloads in one run, each in a process of its own."""

    model: str = option(
        "tiny",
        "tiny, small, moe (random weights, made on first use), qwen3-0.6b, llama-8b (no weights), pocket, "
        "a folder, or a GGUF file",
    )
    workload: tuple[str, ...] = option((), "", choices=tuple(WORKLOADS), metavar="W")
    peer: tuple[str, ...] = option(
        (TRANSFORMERS,),
        f"{NONE}, or of {', '.join(_PEERS)} ({TRANSFORMERS}: the faster of its ways to batch)",
        choices=(NONE, *_PEERS),
        metavar="PEER",
    )
    roofline: bool = option(False, "each workload as a fraction of its floor, also of a model that is small")
    rounds: int = option(3, "measured rounds (3)", COUNT, metavar="N")
    json: str | None = option(None, "write every figure to a file too", metavar="FILE")
    engine_arg: tuple[str, ...] = option((), "EngineArgs fields for Quire", metavar="NAME=VALUE")


def run(options: Options) -> int:
    """Run and print everything; returns 0, or 1 if Quire failed on a workload."""
    peers = choose_peers(options.peer, _PEERS)
    engine_args = dict(_parse_engine_arg(text) for text in options.engine_arg)
    versions = check_peers(peers)
    model = load_bench_model(options.model)
    EngineArgs(model=str(model.path), **engine_args).create_engine_config()  # refused before a child starts
    if quantization := engine_args.get("quantization"):
        model = dataclasses.replace(model, spec=load_spec(options.model, quantization))
    if model.is_dummy and TRANSFORMERS in peers:
        raise InputError("peer", TRANSFORMERS, f"{VLLM} or {NONE}: {model.name} has no weights to load")
    if peers and model.path.is_file():
        raise InputError("peer", peers[0], f"{NONE}: {model.name} is a GGUF file")
    names = options.workload or (GPU_WORKLOADS if options.model in DUMMY_MODELS else CPU_WORKLOADS)
    workloads = {name: make_workload(name, model.spec.vocab_size, "") for name in names}
    machine = print_machine(versions)
    num_params = model.spec.num_active_params
    print(f"{model.name}: {num_params / 1e6:,.2f} M parameters a token, {model.dtype}, {model.path}\n")
    max_len = max(workload.max_total_len for workload in workloads.values())
    rates = _measure_rates(model, options.roofline, engine_args)
    launches = {QUIRE: make_launch(QUIRE, model, max_len, **engine_args)}
    launches |= {peer: make_launch(peer, model, max_len) for peer in peers}
    with open_contestants(launches) as contestants:
        measurements = {
            name: run_rounds(
                contestants, options.rounds, name, lambda number, name=name: _make_job(name, model, number)
            )
            for name in workloads
        }
        processes = {
            contestant.name: (contestant.ready_s, contestant.rss_bytes) for contestant in contestants
        }
    if rates is not None:
        rates = take_better(rates, _measure_rates(model, options.roofline, engine_args) or rates)
    floors = {
        name: compute_floor(workload, model.spec, model.dtype, rates)
        for name, workload in workloads.items()
        if rates is not None
    }
    print(format_rates(measurements, workloads, floors, options.rounds))
    if rates is not None:
        print(_describe_rates(rates))
    print("\n".join(["", format_processes(processes), *describe_prefix_reuse(measurements)]))
    report = {
        "machine": machine,
        "model": {"name": model.name, "dtype": model.dtype},
        "rates": rates,
        "workloads": {
            name: {
                who: {"tokens_per_s": m.rate, "error": m.error, "rounds": m.results}
                for who, m in by_name.items()
            }
            for name, by_name in measurements.items()
        },
        "floors": {name: dataclasses.asdict(floor) for name, floor in floors.items()},
        "processes": processes,
    }
    write_json(options.json, report)
    return int(any(by_name[QUIRE].rate is None for by_name in measurements.values()))


def _make_job(name: str, model: BenchModel, number: int) -> Job:
    workload = make_workload(name, model.spec.vocab_size, f"round {number}")
    if number == 0 and model.spec.num_active_params > _LIGHT_PARAMS:
        workload = cut_outputs(workload, _HEAVY_WARM_UP_TOKENS)
    return Job(requests=workload.requests)


def _measure_rates(
    model: BenchModel, is_asked_for: bool, engine_args: Mapping[str, Any]
) -> MachineRates | None:
    """The rates for this model's steps: a block of their size is read, from memory or from a cache."""
    step_bytes = compute_step_work(model.spec, model.dtype, StepShape(1, 1)).weight_bytes
    if step_bytes < _MIN_MODEL_SIZE_BYTES and not is_asked_for:
        return None
    say("measuring read bandwidth and matrix rate")
    device = str(engine_args.get("device", "auto"))
    rates = measure_rates(device, model.dtype, min(step_bytes, MEMORY_READ_BYTES))
    say("")
    return rates


def format_rates(
    measurements: Measurements, workloads: Mapping[str, Workload], floors: Mapping[str, Floor], rounds: int
) -> str:
    """Generated tokens/s with Quire's ratio to each peer and to the floor, and what the marks mean."""
    peers = [name for name in next(iter(measurements.values())) if name != QUIRE]
    header = ["generated tokens/s", QUIRE, *peers, *(f"{QUIRE} / {peer}" for peer in peers)]
    header += ["floor allows", f"{QUIRE} of it", "floor ms a step", "measured"] if floors else []
    rows: list[list[str]] = []
    for name, by_name in measurements.items():
        rate = by_name[QUIRE].rate
        row = [
            f"{name} {WORKLOADS[name].summary}",
            *(_format_rate(measurement, rounds) for measurement in by_name.values()),
        ]
        others = [by_name[peer].rate for peer in peers]
        row += [f"{rate / other:.2f}x" if rate and other else "-" for other in others]
        if floors:
            floor, num_tokens = floors[name], workloads[name].num_output_tokens
            row.append(format_rate(num_tokens / floor.seconds))
            row.append(f"{rate * floor.seconds / num_tokens:.0%}" if rate else "-")
            row.append(f"{floor.seconds / floor.num_steps * 1e3:.3f}")
            row.append(f"{num_tokens / rate / floor.num_steps * 1e3:.3f}" if rate else "-")
        rows.append(row)
    shown = [(name, who, m) for name, by_name in measurements.items() for who, m in by_name.items()]
    notes = [_NOTE.format(rounds)]
    if any(0 < len(m.results) < rounds for _, _, m in shown):
        notes.append("' fewer rounds, because one took so long")
    notes += [f"{name} {who} failed: {m.error}" for name, who, m in shown if m.error]
    return "\n".join([format_table(header, rows), *notes])


def _format_rate(measurement: Measurement, rounds: int) -> str:
    if measurement.rate is None:
        return "failed" if measurement.error else "-"
    return format_rate(measurement.rate) + ("'" if len(measurement.results) < rounds else "")


def _describe_rates(rates: MachineRates) -> str:
    return (
        f"floor: weights, keys and values read at {rates.read_bytes_per_s / 1e9:.1f} GB/s, operations at "
        f"{rates.flops_per_s / 1e9:,.0f} GFLOP/s, both measured on this {rates.device} in this run; what is "
        "beyond it is kernels below their ceilings, and calls: norms, sampling, scheduling, messages"
    )


def format_processes(processes: Mapping[str, tuple[float, Mapping[str, int]]]) -> str:
    """Load time, Quire's advantage in it, and memory of the processes at their largest after a job."""
    own_ready_s = processes[QUIRE][0]
    rows = [
        [who, role, f"{ready_s:.2f}", f"{ready_s / own_ready_s:.1f}x", format_megabytes(size)]
        for who, (ready_s, rss_bytes) in processes.items()
        for role, size in rss_bytes.items()
    ]
    return format_table(["contestant", "process", "ready after s", f"of {QUIRE}'s", "RSS MB"], rows)


def describe_prefix_reuse(measurements: Measurements) -> Sequence[str]:
    """Whether Quire computed W3's shared prefix once, by the cached tokens that its outputs report."""
    results = measurements["W3"][QUIRE].results if "W3" in measurements else []
    if not results:
        return []
    expected = (results[0].num_requests - 1) * SHARED_PREFIX_LEN
    cached = [result.num_cached_tokens or 0 for result in results]
    verdict = "computed once" if min(cached) >= expected else "NOT computed once"
    shown = ", ".join(f"{count:,}" for count in cached)
    return [f"W3 prefix {verdict}: {shown} prompt tokens came from the cache, {expected:,} could"]


def _parse_engine_arg(text: str) -> tuple[str, Any]:
    """'max_num_seqs=8' -> ('max_num_seqs', 8); a value that is no JSON is a text."""
    name, separator, value = text.partition("=")
    if not separator:
        raise InputError("engine_arg", text, "NAME=VALUE")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value
