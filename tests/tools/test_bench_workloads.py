"""The bench's workloads, floors and tables: what is measured is what the labels say."""

from __future__ import annotations

import pytest
from quire.tools.bench.bench_model import load_spec
from quire.tools.bench.ceilings import MachineRates
from quire.tools.bench.contest import JobResult, Measurement
from quire.tools.bench.cost_model import StepShape, compute_step_work
from quire.tools.bench.floors import Floor, compute_floor, compute_prompts_work
from quire.tools.bench.offline import describe_prefix_reuse, format_processes, format_rates
from quire.tools.bench.peers import QUIRE
from quire.tools.bench.table import format_rate, format_table
from quire.tools.bench.workloads import (
    SHARED_PREFIX_LEN,
    WORKLOADS,
    BenchRequest,
    Workload,
    cut_outputs,
    make_workload,
)

pytestmark = pytest.mark.slow

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


def test_a_warm_up_may_have_shorter_outputs() -> None:
    workload = Workload("W", [BenchRequest([index], 10 + index) for index in range(8)])
    assert [r.num_output_tokens for r in cut_outputs(workload, 12).requests] == [10, 11, *[12] * 6]


def test_a_floor_is_reading_the_weights_each_step_while_that_takes_longer() -> None:
    spec = load_spec("tiny")
    work = compute_step_work(spec, "bfloat16", StepShape(1, 10))
    alone = Workload("W", [BenchRequest([1] * 10, 5)])
    reading = compute_floor(alone, spec, "bfloat16", MachineRates(read_bytes_per_s=1e6, flops_per_s=1e15))
    assert reading.num_steps == 5
    assert reading.seconds == pytest.approx(5 * work.weight_bytes / 1e6, rel=0.02)  # and some keys and values
    computing = compute_floor(alone, spec, "bfloat16", MachineRates(read_bytes_per_s=1e15, flops_per_s=1e6))
    prompt = compute_step_work(spec, "bfloat16", StepShape(0, 0, 10))
    assert computing.seconds == pytest.approx((prompt.flops + 4 * work.flops) / 1e6, rel=0.01)


def test_prompts_share_a_step_and_a_shared_prefix_counts_once() -> None:
    spec, rates = load_spec("tiny"), MachineRates(read_bytes_per_s=1e15, flops_per_s=1e6)
    lengths = [SHARED_PREFIX_LEN, 8, 8, 8]
    workload = Workload("W3", [BenchRequest([1] * (SHARED_PREFIX_LEN + 8), 1)] * 3)
    works = [compute_step_work(spec, "bfloat16", StepShape(0, 0, length)) for length in lengths]
    found = compute_floor(workload, spec, "bfloat16", rates)
    assert found.seconds == pytest.approx(sum(work.flops + work.attention_flops for work in works) / 1e6)
    assert compute_prompts_work(spec, "bfloat16", lengths).weight_bytes == works[0].weight_bytes


def run_w1(seconds: float, rounds: int = 3) -> Measurement:
    return Measurement([JobResult(seconds=seconds, num_requests=1, num_output_tokens=128)] * rounds)


def format_w1(**by_name: Measurement) -> list[str]:
    workloads = {"W1": make_workload("W1", VOCAB_SIZE, "")}
    return format_rates({"W1": by_name}, workloads, {"W1": Floor(128, 128.0)}, 3).splitlines()


def test_a_rate_is_a_median_beside_its_floor_and_its_ratio_to_each_peer() -> None:
    results = [JobResult(seconds=s, num_requests=2, num_output_tokens=100) for s in (1.0, 2.0, 10.0)]
    assert Measurement(results).rate == 50.0
    assert Measurement().rate is None
    header, _, row, *_ = format_w1(quire=run_w1(256.0), vllm=run_w1(512.0))
    assert "quire / vllm" in header
    # 128 tokens in 256 s; the floor allows 128 in 128 s.
    assert row.split()[-7:] == ["0.50", "0.25", "2.00x", "1.00", "50%", "1000.000", "2000.000"]


def test_who_fails_or_takes_too_long_is_marked() -> None:
    *_, row, note, marks, failure = format_w1(
        quire=Measurement(error="quire: out of memory"), vllm=run_w1(400.0, rounds=1)
    )[2:]
    assert row.split()[-7:-4] == ["failed", "0.32'", "-"]
    assert "medians of 3 rounds" in note
    assert marks.startswith("' fewer rounds")
    assert failure == "W1 quire failed: quire: out of memory"
    assert run_w1(400.0, rounds=1).is_over


@pytest.mark.parametrize(
    ("cached", "verdict"), [(15 * SHARED_PREFIX_LEN, "computed once"), (14 * SHARED_PREFIX_LEN, "NOT comp")]
)
def test_a_prefix_that_is_computed_twice_is_told(cached: int, verdict: str) -> None:
    result = JobResult(seconds=1.0, num_requests=16, num_output_tokens=512, num_cached_tokens=cached)
    (line,) = describe_prefix_reuse({"W3": {QUIRE: Measurement([result])}})
    assert f"prefix {verdict}" in line


def test_tables_line_up() -> None:
    table = format_table(["name", "x"], [["a", "1,000"], ["longer", "2"]])
    assert table.splitlines() == ["name        x", "------  -----", "a       1,000", "longer      2"]


@pytest.mark.parametrize(("value", "text"), [(8.618, "8.62"), (86.18, "86.2"), (8618.2, "8,618")])
def test_rates_have_three_digits(value: float, text: str) -> None:
    assert format_rate(value) == text


def test_ready_times_are_shown_as_multiples_of_quires() -> None:
    table = format_processes({QUIRE: (2.0, {"worker": 1_000_000}), "vllm": (30.0, {"process": 1})})
    assert table.splitlines()[-1].split() == ["vllm", "process", "30.00", "15.0x", "0"]
