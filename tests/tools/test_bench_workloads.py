"""The bench's workloads, floors and tables: what is measured is what the labels say."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
from quire.tools.bench.ceilings import MachineRates
from quire.tools.bench.contest import JobResult
from quire.tools.bench.floors import ModelSize, compute_floor
from quire.tools.bench.measurement import QUIRE, Measurement, Measurements
from quire.tools.bench.model_facts import ModelFacts
from quire.tools.bench.offline_report import OfflineReport
from quire.tools.bench.table import format_rate, format_table
from quire.tools.bench.workloads import (
    SHARED_PREFIX_LEN,
    WORKLOADS,
    BenchRequest,
    Workload,
    cut_outputs,
    make_workload,
    take_sample,
)

VOCAB_SIZE = 2048


@pytest.mark.parametrize("name", WORKLOADS)
def test_contents_change_the_ids_and_nothing_else(name: str) -> None:
    one, again, other = (make_workload(name, VOCAB_SIZE, contents) for contents in ("a", "a", "b"))
    assert one == again
    assert [len(r.prompt_token_ids) for r in one.requests] == [
        len(r.prompt_token_ids) for r in other.requests
    ]
    assert [r.num_output_tokens for r in one.requests] == [r.num_output_tokens for r in other.requests]
    for mine, theirs in zip(one.requests, other.requests, strict=True):
        assert mine.prompt_token_ids[:16] != theirs.prompt_token_ids[:16], "a warm-up would warm its cache"
    assert all(0 <= token < VOCAB_SIZE for r in one.requests for token in r.prompt_token_ids)


def test_the_workloads_are_as_large_as_they_say() -> None:
    w1, w2, w3, w4, w5 = (make_workload(name, VOCAB_SIZE, "") for name in WORKLOADS)
    assert [len(w.requests) for w in (w1, w2, w3, w4, w5)] == [1, 32, 16, 256, 256]
    assert all(
        100 <= len(r.prompt_token_ids) <= 1024 and 100 <= r.num_output_tokens <= 1024 for r in w5.requests
    )
    assert (w1.num_prompt_tokens, w1.num_output_tokens) == (128, 128)
    assert all(32 <= len(r.prompt_token_ids) <= 256 and 16 <= r.num_output_tokens <= 128 for r in w2.requests)
    assert all(32 <= len(r.prompt_token_ids) <= 64 and 32 <= r.num_output_tokens <= 64 for r in w4.requests)
    assert w3.num_prompt_tokens == 16 * (SHARED_PREFIX_LEN + 32)
    prefixes = {tuple(r.prompt_token_ids[:SHARED_PREFIX_LEN]) for r in w3.requests}
    assert len(prefixes) == 1
    assert len({tuple(r.prompt_token_ids) for r in w3.requests}) == 16


def test_a_sample_is_spread_over_the_workload_and_cuts_only_lengths() -> None:
    workload = Workload("W", [BenchRequest([index], 10 + index) for index in range(8)])
    assert [r.prompt_token_ids[0] for r in take_sample(workload, 4).requests] == [0, 2, 4, 6]
    assert take_sample(workload, 8) == workload
    assert [r.num_output_tokens for r in cut_outputs(workload, 12).requests] == [10, 11, *[12] * 6]


def test_a_floor_is_reading_the_weights_each_step_while_that_takes_longer() -> None:
    size = ModelSize(num_layer_params=100, num_head_params=20, bytes_per_param=2)
    alone = Workload("W", [BenchRequest([1] * 10, 5)])
    # 240 bytes a step, of 5 steps; the 10 prompt tokens' 2,000 operations of the layers and 40 of the head
    # take longer than that where operations are slow.
    reading = compute_floor(alone, size, MachineRates(read_bytes_per_s=240.0, flops_per_s=1e6))
    assert (reading.num_steps, reading.seconds) == (5, pytest.approx(5.0))
    computing = compute_floor(alone, size, MachineRates(read_bytes_per_s=1e6, flops_per_s=2040.0))
    assert computing.seconds == computing.matmul_s == pytest.approx(1.0 + 4 * 240 / 2040)


def test_a_floor_counts_every_key_that_a_query_sees() -> None:
    size = ModelSize(0, 0, 2, kv_bytes_per_token=8, attention_flops_per_key=4)
    alone = Workload("W", [BenchRequest([1] * 3, 3)])
    floor = compute_floor(alone, size, MachineRates(read_bytes_per_s=1.0, flops_per_s=1.0))
    assert floor.kv_read_s == 8 * (3 + 4 + 5)
    assert floor.attention_s == 4 * (1 + 2 + 3 + 4 + 5)


def test_a_shared_prefix_counts_once_in_the_floor() -> None:
    size = ModelSize(100, 0, 2, kv_bytes_per_token=8, attention_flops_per_key=4)
    workload = Workload("W3", [BenchRequest([1] * (SHARED_PREFIX_LEN + 8), 1)] * 3)
    floor = compute_floor(workload, size, MachineRates(read_bytes_per_s=8.0, flops_per_s=200.0))
    assert floor.matmul_s == pytest.approx(SHARED_PREFIX_LEN + 3 * 8)
    assert floor.kv_read_s == pytest.approx(SHARED_PREFIX_LEN + 3 * 8)
    own_pairs = 3 * (8 * SHARED_PREFIX_LEN + 36)
    assert floor.attention_s == pytest.approx(
        (SHARED_PREFIX_LEN * (SHARED_PREFIX_LEN + 1) / 2 + own_pairs) / 50
    )


def test_a_rate_is_a_median_and_a_sample_is_marked() -> None:
    results = [JobResult(seconds=s, num_requests=2, num_output_tokens=100) for s in (1.0, 2.0, 10.0)]
    assert Measurement(results, num_requests_of=2).rate == 50.0
    assert not Measurement(results, num_requests_of=2).is_sample
    assert Measurement(results, num_requests_of=3).is_sample
    assert Measurement().rate is None


def make_report(
    measurements: Measurements, peers: tuple[str, ...] = (), rates: MachineRates | None = None
) -> OfflineReport:
    facts = ModelFacts("m", Path("m"), VOCAB_SIZE, "bf16", 1, ModelSize(1, 1, 2))
    workloads = {name: make_workload(name, VOCAB_SIZE, "") for name in measurements}
    by_name = {name: defaultdict(Measurement, found) for name, found in measurements.items()}
    processes = {QUIRE: (2.0, {"worker": 1_000_000})} | {peer: (30.0, {"process": 1}) for peer in peers}
    return OfflineReport(facts, workloads, peers, 3, by_name, rates, processes)


@pytest.mark.parametrize(
    ("cached", "verdict"), [(15 * SHARED_PREFIX_LEN, "computed once"), (14 * SHARED_PREFIX_LEN, "NOT comp")]
)
def test_a_prefix_that_is_computed_twice_is_told(cached: int, verdict: str) -> None:
    result = JobResult(seconds=1.0, num_requests=16, num_output_tokens=512, num_cached_tokens=cached)
    measurements = {"W3": {QUIRE: Measurement([result], num_requests_of=16)}}
    (line,) = make_report(measurements).describe_prefix_reuse()
    assert f"prefix {verdict}" in line


def test_tables_line_up() -> None:
    table = format_table(["name", "x"], [["a", "1,000"], ["longer", "2"]])
    assert table.splitlines() == ["name        x", "------  -----", "a       1,000", "longer      2"]


@pytest.mark.parametrize(("value", "text"), [(8.618, "8.62"), (86.18, "86.2"), (8618.2, "8,618")])
def test_rates_have_three_digits(value: float, text: str) -> None:
    assert format_rate(value) == text


def run_w1(seconds: float, rounds: int = 3) -> Measurement:
    return Measurement([JobResult(seconds=seconds, num_requests=1, num_output_tokens=128)] * rounds, 1)


def test_a_peer_that_ran_one_slow_round_is_marked() -> None:
    measurements: Measurements = {"W1": {QUIRE: run_w1(99.0), "transformers-static": run_w1(99.0, rounds=1)}}
    table = make_report(measurements, ("transformers-static",)).format_rates()
    assert table.count("1.29") == 2
    assert table.count("1.29'") == 1
    assert "1.00x" in table
    assert "' one round only" in table


def test_a_contestant_that_failed_is_told_and_has_no_ratio() -> None:
    measurements: Measurements = {
        "W1": {QUIRE: Measurement(error="quire: out of memory"), "vllm": run_w1(1.0)}
    }
    table = make_report(measurements, ("vllm",)).format_rates()
    row = table.splitlines()[2].split()
    assert row[-3:] == ["failed", "128", "-"]
    assert "W1 quire failed: quire: out of memory" in table


def test_transformers_modes_share_a_column_that_shows_their_best() -> None:
    by_name = {QUIRE: run_w1(1.0), "vllm": run_w1(2.0)}
    by_name |= {"transformers-sequential": run_w1(8.0), "transformers-static": run_w1(4.0)}
    peers = ("vllm", "transformers-sequential", "transformers-static", "transformers-continuous")
    table = make_report({"W1": by_name}, peers).format_rates()
    assert table.splitlines()[0].split("  ")[-1].strip() == "quire / transformers"
    assert table.splitlines()[2].split()[-5:] == ["128", "64.0", "32.0", "2.00x", "4.00x"]
    assert "the best of its three modes, W1 static" in table


def test_a_roofline_shows_what_a_step_took_beside_what_it_must_take() -> None:
    rates = MachineRates(read_bytes_per_s=4.0, flops_per_s=1e9)  # a step reads 4 bytes: 1 s
    table = make_report({"W1": {QUIRE: run_w1(256.0)}}, rates=rates).format_roofline()
    row = table.splitlines()[2].split()
    assert row[:3] == ["W1", "128.00", "128.00"]
    assert row[-4:] == ["50%", "128", "1000.000", "2000.000"]


def test_ready_times_are_shown_as_multiples_of_quires() -> None:
    table = make_report({"W1": {QUIRE: run_w1(1.0)}}, ("vllm",)).format_processes()
    assert table.splitlines()[-1].split() == ["vllm", "process", "30.00", "15.0x", "0"]
