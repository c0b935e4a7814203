"""The tables of `quire bench offline`: rates and ratios, floors and what they consist of, processes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from .ceilings import MachineRates
from .floors import Floor, compute_floor
from .measurement import QUIRE, Measurement, Measurements
from .model_facts import ModelFacts
from .peers import TRANSFORMERS_MODES
from .table import format_megabytes, format_rate, format_table
from .workloads import SHARED_PREFIX_LEN, WORKLOADS, Workload

_TRANSFORMERS = "transformers"  # the column of all its modes together


@dataclass(frozen=True, slots=True)
class OfflineReport:
    """One run's figures. `processes`: contestant -> (ready after s, role -> largest resident bytes)."""

    facts: ModelFacts
    workloads: dict[str, Workload]
    peers: tuple[str, ...]
    rounds: int
    measurements: Measurements
    rates: MachineRates | None
    processes: dict[str, tuple[float, dict[str, int]]]

    def format(self, is_roofline: bool) -> str:
        """Everything that the command prints after its run."""
        parts = [self.format_rates(), self.format_processes()]
        if is_roofline:
            parts.insert(1, self.format_roofline())
        return "\n\n".join([*parts, *self.describe_prefix_reuse()])

    def format_rates(self) -> str:
        """Generated tokens/s with Quire's ratio to each peer, its floor, and what the marks mean."""
        columns = _group_peers(self.peers)
        header = ["generated tokens/s", QUIRE, *columns, *(f"{QUIRE} / {column}" for column in columns)]
        header += ["floor allows", f"{QUIRE} of it"] if self.rates else []
        rows = [self._format_row(name, columns) for name in self.workloads]
        return "\n".join([format_table(header, rows), *self._describe_marks()])

    def _format_row(self, name: str, columns: dict[str, tuple[str, ...]]) -> list[str]:
        own = self.measurements[name][QUIRE].rate
        best = {column: self._find_best(name, peers) for column, peers in columns.items()}
        row = [f"{name} {WORKLOADS[name].summary}", self._format_measurement(name, QUIRE)]
        row += [self._format_measurement(name, peer) for peer in best.values()]
        for peer in best.values():
            rate = self.measurements[name][peer].rate
            row.append(f"{own / rate:.2f}x" if own and rate else "-")
        if self.rates:
            ceiling = self.workloads[name].num_output_tokens / self._compute_floor(name).seconds
            row += [format_rate(ceiling), f"{own / ceiling:.0%}" if own else "-"]
        return row

    def _find_best(self, name: str, peers: Sequence[str]) -> str:
        return max(peers, key=lambda peer: self.measurements[name][peer].rate or 0.0)

    def _format_measurement(self, name: str, who: str) -> str:
        measurement = self.measurements[name][who]
        rate = measurement.rate
        if rate is None:
            return "failed" if measurement.error else "-"
        is_cut = len(measurement.results) < self.rounds
        return format_rate(rate) + ("*" if measurement.is_sample else "") + ("'" if is_cut else "")

    def _describe_marks(self) -> list[str]:
        shown = [m for by_name in self.measurements.values() for m in by_name.values()]
        notes = [
            f"medians of {self.rounds} rounds after a warm-up of the same shapes with other contents; "
            "greedy, EOS ignored, token ids in and out; each round begins when the other contestants are idle"
        ]
        if _TRANSFORMERS in _group_peers(self.peers):
            best = {name: self._find_best(name, tuple(TRANSFORMERS_MODES)) for name in self.workloads}
            modes = ", ".join(f"{name} {TRANSFORMERS_MODES[peer]}" for name, peer in best.items())
            notes.append(f"transformers: the best of its three modes, {modes}")
        if any(m.is_sample for m in shown):
            notes.append(
                "* measured on an even sample of the requests (one at a time, so the rate is the same)"
            )
        if any(0 < len(m.results) < self.rounds for m in shown):
            notes.append("' one round only, because it took so long")
        if self.rates:
            notes.append(_describe_rates(self.rates, self.facts))
        for name, by_name in self.measurements.items():
            notes += [f"{name} {who} failed: {m.error}" for who, m in by_name.items() if m.error]
        return notes

    def format_roofline(self) -> str:
        """Each workload's floor, its parts, and what a step took beside what it must take."""
        assert self.rates is not None, "the roofline was asked for, so the rates were measured"
        header = ["least seconds", "floor", "weights read", "matmul", "KV read", "attention", "measured"]
        header += ["floor / measured", "steps", "floor ms a step", "measured ms a step"]
        rows: list[list[str]] = []
        for name in self.workloads:
            floor, results = self._compute_floor(name), self.measurements[name][QUIRE].results
            parts = (floor.seconds, floor.weights_read_s, floor.matmul_s, floor.kv_read_s, floor.attention_s)
            row = [name, *(_format_seconds(part) for part in parts)]
            if results:
                seconds = statistics.median(result.seconds for result in results)
                row += [_format_seconds(seconds), f"{floor.seconds / seconds:.0%}", f"{floor.num_steps}"]
                row += [f"{s / floor.num_steps * 1e3:.3f}" for s in (floor.seconds, seconds)]
            else:
                row += ["-", "-", f"{floor.num_steps}", f"{floor.seconds / floor.num_steps * 1e3:.3f}", "-"]
            rows.append(row)
        note = (
            "a step's floor is the larger of its reads and its operations; prompts are computed in one step; "
            "what is measured beyond the floor is kernels below their ceilings, and calls: "
            "norms, sampling, scheduling, messages"
        )
        return format_table(header, rows) + "\n" + note

    def _compute_floor(self, name: str) -> Floor:
        assert self.rates is not None
        return compute_floor(self.workloads[name], self.facts.size, self.rates)

    def format_processes(self) -> str:
        """Load time, Quire's advantage in it, and memory of the processes at their largest after a job."""
        own_ready_s = self.processes[QUIRE][0]
        rows = [
            [who, role, f"{ready_s:.2f}", f"{ready_s / own_ready_s:.1f}x", format_megabytes(size)]
            for who, (ready_s, rss_bytes) in self.processes.items()
            for role, size in rss_bytes.items()
        ]
        return format_table(["contestant", "process", "ready after s", f"of {QUIRE}'s", "RSS MB"], rows)

    def describe_prefix_reuse(self) -> list[str]:
        """Whether Quire computed W3's shared prefix once, by the cached tokens that its outputs report."""
        measurement = self.measurements["W3"][QUIRE] if "W3" in self.measurements else Measurement()
        if not measurement.results:
            return []
        expected = (measurement.num_requests_of - 1) * SHARED_PREFIX_LEN
        found = [result.num_cached_tokens or 0 for result in measurement.results]
        verdict = "computed once" if min(found) >= expected else "NOT computed once"
        shown = ", ".join(f"{count:,}" for count in found)
        return [f"W3 prefix {verdict}: {shown} prompt tokens came from the cache, {expected:,} could"]

    def encode(self, machine: dict[str, str]) -> bytes:
        """Every figure as formatted JSON."""
        report = {
            "machine": machine,
            "model": {
                "name": self.facts.name,
                "num_params": self.facts.num_params,
                "dtype": self.facts.dtype,
            },
            "rates": self.rates,
            "workloads": {
                name: {
                    who: {
                        "tokens_per_s": m.rate,
                        "is_sample": m.is_sample,
                        "error": m.error,
                        "rounds": m.results,
                    }
                    for who, m in by_name.items()
                }
                for name, by_name in self.measurements.items()
            },
            "floors": {name: self._compute_floor(name) for name in self.workloads} if self.rates else None,
            "processes": {
                who: {"ready_s": ready_s, "rss_bytes": rss_bytes}
                for who, (ready_s, rss_bytes) in self.processes.items()
            },
        }
        return msgspec.json.format(msgspec.json.encode(report)) + b"\n"


def _group_peers(peers: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Column -> the contestants in it: transformers' modes share one when all of them run."""
    if not set(TRANSFORMERS_MODES) <= set(peers):
        return {peer: (peer,) for peer in peers}
    columns = {peer: (peer,) for peer in peers if peer not in TRANSFORMERS_MODES}
    return columns | {_TRANSFORMERS: tuple(TRANSFORMERS_MODES)}


def _describe_rates(rates: MachineRates, facts: ModelFacts) -> str:
    size_mb = facts.size.step_bytes / 1e6
    dtype = "bf16" if facts.is_gguf else facts.dtype
    return (
        f"floor: {size_mb:,.0f} MB of weights a step and the keys and values read at "
        f"{rates.read_bytes_per_s / 1e9:.1f} GB/s, operations at {rates.flops_per_s / 1e9:,.0f} GFLOP/s "
        f"{dtype}; both measured on this {rates.device} in this run, the reads on a block of that size"
    )


def _format_seconds(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds >= 1 else f"{seconds:.4f}"
