"""`quire bench serve` against a server with known delays: its figures are those delays."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from mock_openai import Behaviour, MockOpenAI
from quire.ipc.errors import InputError
from quire.tools.bench.http_stream import Endpoint, HttpClient
from quire.tools.bench.load import LoadOptions, LoadResult, RequestRecord, draw_offsets, run_load
from quire.tools.bench.prompts import Ask, LengthRange, make_random_asks, read_asks
from quire.tools.bench.serve_metrics import compute_metrics, compute_percentile, parse_goodput, summarize

INF = math.inf


def run_load_on(behaviour: Behaviour, options: LoadOptions, num_requests: int) -> LoadResult:
    async def load(mock: MockOpenAI) -> LoadResult:
        endpoint = Endpoint.parse(mock.base_url, None)
        client = HttpClient(endpoint)
        body = Ask("a b c", 100).encode("mock", "completions", 0.0, ignore_eos=False)
        requests = [endpoint.encode_request("POST", "/v1/completions", body)] * num_requests
        result = await run_load(client, requests, options)
        await client.close()
        return result

    with MockOpenAI(behaviour) as mock:
        return asyncio.run(load(mock))


def get_medians(result: LoadResult) -> dict[str, float]:
    latencies = compute_metrics(result, {}).latencies
    return {name: summary["median"] for name, summary in latencies.items() if summary is not None}


def test_the_servers_delays_come_out_as_the_latencies() -> None:
    behaviour = Behaviour(first_delay_s=0.1, gap_s=0.03, num_tokens=5)
    result = run_load_on(behaviour, LoadOptions(INF, None, 5.0, 0), 4)
    figures = compute_metrics(result, {}).figures
    assert (figures["completed"], figures["failed"], figures["max_concurrent_requests"]) == (4, 0, 4)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (12, 20)
    medians = get_medians(result)
    # A delay can only be late, and a busy machine is late by tens of milliseconds at times.
    assert 100 <= medians["ttft"] < 300
    assert 30 <= medians["tpot"] < 90
    assert 29 <= medians["itl"] < 90
    assert 219 <= medians["e2el"] < 600


def test_the_open_loop_is_not_held_back_by_slow_answers() -> None:
    # One slot of 50 ms a request and a request every 5 ms: the last of 20 waits for most of a second.
    behaviour = Behaviour(first_delay_s=0.05, num_tokens=1, num_slots=1)
    options = LoadOptions(200.0, None, 10.0, 0)
    result = run_load_on(behaviour, options, 20)
    due = [record.due_at - result.started_at for record in result.records]
    assert due == pytest.approx(draw_offsets(20, options), abs=1e-6)
    # Sent one after the other, the last would be sent after 19 answers, 0.95 s.
    assert max(record.sent_at - record.due_at for record in result.records) < 0.5
    assert result.records[-1].sent_at - result.started_at < 0.5
    last = result.records[-1]
    assert last.first_at is not None
    assert last.first_at - last.due_at > 0.5


def test_waiting_for_a_slot_counts_unless_the_loop_is_closed() -> None:
    behaviour = Behaviour(first_delay_s=0.05, num_tokens=1)
    due = run_load_on(behaviour, LoadOptions(1000.0, 1, 10.0, 0), 10)
    sent = run_load_on(behaviour, LoadOptions(INF, 2, 10.0, 0), 10)
    for result, limit in ((due, 1), (sent, 2)):
        assert compute_metrics(result, {}).figures["max_concurrent_requests"] == limit
        assert result.duration_s >= 10 / limit * 0.05
    assert get_medians(due)["ttft"] > 200
    assert 50 <= get_medians(sent)["ttft"] < 150


def test_pieces_are_counted_where_the_server_counts_no_tokens() -> None:
    result = run_load_on(Behaviour(has_usage=False, num_tokens=3), LoadOptions(INF, None, 5.0, 0), 2)
    metrics = compute_metrics(result, {})
    assert (metrics.figures["total_output_tokens"], metrics.is_counted_by_server) == (6, False)


def test_arrivals_are_a_poisson_process_that_its_seed_repeats() -> None:
    options = LoadOptions(50.0, None, 1.0, seed=3)
    offsets = draw_offsets(5000, options)
    gaps = [b - a for a, b in pairwise(offsets)]
    assert offsets == draw_offsets(5000, options)
    assert offsets != draw_offsets(5000, LoadOptions(50.0, None, 1.0, seed=4))
    # Mean and deviation of an exponential are both 1/rate; each is within 4 of its standard errors (1/70).
    assert statistics.fmean(gaps) == pytest.approx(0.02, rel=4 / 70)
    assert statistics.stdev(gaps) == pytest.approx(0.02, rel=8 / 70)
    assert draw_offsets(3, LoadOptions(INF, None, 1.0, 0)) == [0.0] * 3


def make_record(due_at: float, times: list[float], error: str | None = None) -> RequestRecord:
    return RequestRecord(
        due_at,
        sent_at=due_at,
        first_at=times[0] if times else None,
        ended_at=times[-1] if times else due_at + 1,
        text_times=times,
        num_prompt_tokens=10,
        num_output_tokens=len(times),
        has_usage=True,
        error=error,
    )


def test_goodput_counts_the_requests_that_keep_every_limit() -> None:
    records = [
        make_record(0.0, [0.1, 0.2, 0.3]),
        make_record(0.0, [0.3, 0.4, 0.5]),  # its first token is late
        make_record(0.0, [0.1, 0.2, 0.6]),  # one gap is long, its mean is not
        make_record(0.0, [0.1, 0.2], error="HTTP 429: x"),
    ]
    result = LoadResult(records, 0.0, 2.0, 0.0, [])
    for words, num_good in [
        (["ttft:200"], 2),
        (["itl:250"], 2),
        (["tpot:251"], 3),
        (["ttft:200", "itl:250"], 1),
        (["e2e:550"], 2),
    ]:
        metrics = compute_metrics(result, parse_goodput(words))
        assert metrics.figures["request_goodput"] == num_good / 2.0, words
    metrics = compute_metrics(result, {})
    assert metrics.figures["request_goodput"] is None
    assert metrics.errors == {"HTTP 429: x": 1}
    assert metrics.figures["total_output_tokens"] == 9, "failed requests give no tokens"


@pytest.mark.parametrize("word", ["ttft", "ttft:", "x:3", "ttft:-1", "ttft:nan", "ttft:inf", "e2e:0"])
def test_a_goodput_limit_is_a_name_and_milliseconds(word: str) -> None:
    with pytest.raises(InputError, match="goodput="):
        parse_goodput([word])


def test_percentiles_lie_between_the_two_nearest_values() -> None:
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert [compute_percentile(values, share) for share in (0.0, 0.5, 0.9, 1.0)] == [1.0, 3.0, 4.6, 5.0]
    summary = summarize([0.001, 0.003])
    assert summary == pytest.approx({"mean": 2, "std": 1, "median": 2, "p90": 2.8, "p99": 2.98, "max": 3})
    assert summarize([]) is None


def test_random_prompts_have_their_lengths_and_a_seed_repeats_them() -> None:
    lengths = LengthRange.parse("input_len", "5-9"), LengthRange.parse("output_len", "7")
    asks = make_random_asks(50, *lengths, seed=1)
    assert asks == make_random_asks(50, *lengths, seed=1)
    assert {len(str(ask.prompt).split()) for ask in asks} == {5, 6, 7, 8, 9}
    assert {ask.max_tokens for ask in asks} == {7}
    assert len({str(ask.prompt) for ask in asks}) == 50
    assert asks[0].prompt != make_random_asks(1, *lengths, seed=2)[0].prompt


@pytest.mark.parametrize("text", ["", "0", "9-5", "x", "1-", "-1", "5-6-7", "99999999", "٣"])
def test_a_length_is_a_number_or_a_range(text: str) -> None:
    with pytest.raises(InputError, match="input_len="):
        LengthRange.parse("input_len", text)


def test_a_dataset_has_prompts_and_messages_and_their_lengths(tmp_path: Path) -> None:
    path = tmp_path / "asks.jsonl"
    path.write_text('{"prompt": "hi"}\n\n{"messages": [{"role": "user", "content": "x"}], "max_tokens": 9}\n')
    first, second = read_asks(str(path), "chat", LengthRange(3, 3), seed=0)
    assert first == Ask("hi", 3)
    body = json.loads(second.encode("m", "chat", 0.5, ignore_eos=True))
    assert body["messages"] == [{"role": "user", "content": "x"}]
    assert (body["max_tokens"], body["ignore_eos"], body["temperature"]) == (9, True, 0.5)
    assert json.loads(first.encode("m", "chat", 0.0, ignore_eos=False))["messages"] == [
        {"role": "user", "content": "hi"}
    ]


@pytest.mark.parametrize(
    "line",
    ["x", "[]", "{}",
     '{"prompt": ""}', '{"prompt": "a", "messages": [{}]}', '{"prompt": "a", "max_tokens": 0}',
     '{"promt": "a"}', '{"messages": [{"role": "user", "content": "x"}]}'],
)  # fmt: skip
def test_a_bad_line_of_a_dataset_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "asks.jsonl"
    path.write_text(f'{{"prompt": "hi"}}\n{line}\n')
    with pytest.raises(InputError, match=r"asks\.jsonl:2'"):
        read_asks(str(path), "completions", LengthRange(3, 3), seed=0)


def run_bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quire", "bench", "serve", *arguments]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)


def test_the_command_prints_tables_and_writes_json(tmp_path: Path) -> None:
    report = tmp_path / "out.json"
    with MockOpenAI(Behaviour(first_delay_s=0.02, gap_s=0.005, num_tokens=6)) as mock:
        done = run_bench(
            *("--base-url", mock.base_url + "/v1", "--num-prompts", "12", "--max-concurrency", "4"),
            *("--output-len", "2-4", "--goodput", "ttft:5000", "--api-key", "sesame", "--num-warmups", "3"),
            *("--json", str(report)),
        )
    assert (done.returncode, done.stderr) == (0, "")
    assert "mock, 12 requests, 4 users" in done.stdout
    assert "time to first token (TTFT)" in done.stdout
    assert "closed loop" in done.stdout
    assert "sesame" not in done.stdout + report.read_text()
    figures: dict[str, Any] = json.loads(report.read_text())
    assert (figures["completed"], figures["failed"], len(figures["ttfts"])) == (12, 0, 12)
    assert figures["request_goodput"] == figures["request_throughput"] > 0
    assert figures["p99_ttft_ms"] >= figures["median_ttft_ms"] >= 20
    assert len(mock.asked) == 15
    path, headers, body = mock.asked[-1]
    assert (path, headers["authorization"], body["model"]) == (
        "/v1/chat/completions",
        "Bearer sesame",
        "mock",
    )


def test_failed_requests_are_counted_by_reason_and_end_with_code_1(tmp_path: Path) -> None:
    dataset = tmp_path / "asks.jsonl"
    dataset.write_text('{"prompt": "good"}\n{"prompt": "bad"}\n')
    with MockOpenAI(Behaviour(failures={"bad": "refuse"})) as mock:
        done = run_bench(
            *("--base-url", mock.base_url, "--num-prompts", "6", "--request-rate", "200"),
            *("--dataset", str(dataset), "--endpoint", "completions"),
        )
    assert done.returncode == 1
    assert "failed, 3 times: HTTP 429: too many requests" in done.stdout
    assert "open loop" in done.stdout


def test_a_server_that_is_not_there_is_one_line() -> None:
    with MockOpenAI() as mock:
        base_url = mock.base_url
    done = run_bench("--base-url", base_url)
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    assert "lists no models" in done.stderr
