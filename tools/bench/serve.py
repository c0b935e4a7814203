"""`quire bench serve`: load against any OpenAI-compatible server, and what its users would have seen."""

from __future__ import annotations

import asyncio
import contextlib
import math
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from tqdm import tqdm

from ...ipc.errors import InputError, QuireError
from ..options import COUNT, INDEX, Check, option
from .http_stream import AnswerError, AnswerReader, Endpoint, HttpClient
from .load import LoadOptions, LoadResult, LoadRun, RequestRecord, send_request
from .machine import describe_machine, print_facts, write_json
from .prompts import (
    PATHS,
    RANDOM,
    Ask,
    BodyOptions,
    EndpointKind,
    LengthRange,
    encode_body,
    make_random_asks,
    read_asks,
)
from .serve_metrics import (
    METRICS,
    LatencySummary,
    ServeMetrics,
    compute_metrics,
    compute_percentile,
    parse_goodput,
)
from .table import format_rate, format_table

# Above this share of a core, or with timers this late, the client's own waiting shows in the latencies.
_BUSY_CPU_SHARE = 0.7
_LATE_S = 0.02
_MODELS_TIMEOUT_S = 30.0
_MAX_REASONS = 5


EPILOG = """\
Lines of --dataset FILE: {"prompt": TEXT} or {"messages": [...]}, and "max_tokens" for its own.
Exit code: 0 when every request was answered, 1 otherwise."""
_NOT_NEGATIVE = Check(lambda value: 0 <= value < math.inf, "a number of at least 0")
_RATE = Check(lambda value: value > 0, "a number above 0, or inf")
_SECONDS = Check(lambda value: 0 < value < math.inf, "seconds above 0")


@dataclass(frozen=True, slots=True)
class Options:
    """Load on an OpenAI-compatible server, and what its users would see."""

    base_url: str = option("http://127.0.0.1:8000", "the server (%(default)s)", metavar="URL")
    model: str | None = option(None, "default: the first that the server lists", metavar="ID")
    endpoint: EndpointKind = option(  # noqa: RUF009
        "chat", "which API (%(default)s)", choices=tuple(PATHS)
    )
    api_key: str | None = option(None, "sent as the bearer token", metavar="KEY")
    dataset: str = option(RANDOM, "random words, or a file of JSON lines", metavar="D")
    input_len: str = option("32-128", "words in a random prompt, or a range (%(default)s)", metavar="N")
    output_len: str = option("64", "most tokens of an answer, or a range (%(default)s)", metavar="N")
    ignore_eos: bool = option(False, "ask for answers of the full length (not every server can)")
    temperature: float = option(0.0, "of the answers (%(default)s)", _NOT_NEGATIVE, metavar="T")
    num_prompts: int = option(100, "requests to measure (%(default)s)", COUNT, metavar="N")
    num_warmups: int = option(2, "requests before, not measured (%(default)s)", INDEX, metavar="N")
    request_rate: float = option(math.inf, "open loop: requests/s, or inf", _RATE, metavar="R")
    max_concurrency: int | None = option(
        None, "most requests at a time; closed loop if rate inf", COUNT, type=int, metavar="C"
    )
    timeout: float = option(600.0, "for one whole answer (%(default)s)", _SECONDS, metavar="S")
    seed: int = option(0, "of prompts, lengths and times (%(default)s)", metavar="N")
    goodput: tuple[str, ...] = option((), "limits of ttft, tpot, itl, e2e", metavar="NAME:MS")
    json: str | None = option(None, "write every figure to a file too", metavar="FILE")


@dataclass(frozen=True, slots=True)
class ServeRun:
    """A finished run and the name of the model that was asked."""

    model: str
    result: LoadResult


def run(options: Options) -> int:
    """Run, print, write; returns 0 when every request was answered and 1 otherwise.

    Raises InputError before anything is sent, QuireError when the server cannot be asked at all.
    """
    endpoint = Endpoint.parse(options.base_url, options.api_key)
    path, limits_s = options.json, parse_goodput(options.goodput)
    if path is not None and (not Path(path).parent.is_dir() or Path(path).is_dir()):
        raise InputError("json", path, "a file name in a folder that exists")
    warmups, asks = make_asks(options)
    machine = describe_machine()
    if options.api_key is not None:
        machine["command"] = machine["command"].replace(options.api_key, "...")
    raise_file_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        serve_run = runner.run(_ask_server(endpoint, options, warmups, asks))
    metrics = compute_metrics(serve_run.result, limits_s)
    print_facts(machine)
    print(format_report(options, serve_run, metrics))
    write_json(path, make_report(options, serve_run, metrics) | {"machine": machine})
    return 0 if metrics.failed == 0 else 1


def make_asks(options: Options) -> tuple[list[Ask], list[Ask]]:
    """(warm-ups, measured ones); no measured prompt is a warm-up's, so that it is in no cache by that."""
    lengths = (
        LengthRange.parse("input_len", options.input_len),
        LengthRange.parse("output_len", options.output_len),
    )
    if options.dataset == RANDOM:
        return (
            make_random_asks(options.num_warmups, *lengths, f"warm-up/{options.seed}"),
            make_random_asks(options.num_prompts, *lengths, options.seed),
        )
    asks = read_asks(options.dataset, options.endpoint, lengths[1], options.seed)
    warmups = make_random_asks(options.num_warmups, *lengths, "warm-up")
    return warmups, [asks[index % len(asks)] for index in range(options.num_prompts)]


async def _ask_server(
    endpoint: Endpoint, options: Options, warmups: Sequence[Ask], asks: Sequence[Ask]
) -> ServeRun:
    client = HttpClient(endpoint)
    try:
        model = options.model or await find_first_model(client)
        body = BodyOptions(model, options.endpoint, options.temperature, options.ignore_eos)
        path = PATHS[options.endpoint]
        # Encoded beforehand: while the load runs, the client only sends and reads.
        requests = [endpoint.encode_request("POST", path, encode_body(ask, body)) for ask in asks]
        for ask in warmups:
            await _warm_up(client, endpoint.encode_request("POST", path, encode_body(ask, body)), options)
        load = LoadOptions(
            options.request_rate,
            options.max_concurrency,
            options.timeout,
            options.seed,
            wants_vectors=options.endpoint == "embeddings",
        )
        is_watched = sys.stderr.isatty()
        with tqdm(
            total=len(requests), unit=" requests", disable=not is_watched, mininterval=0.5, leave=False
        ) as bar:

            def advance(_: RequestRecord) -> None:
                bar.update()

            result = await LoadRun(client, requests, load, advance).run()
        return ServeRun(model, result)
    finally:
        await client.close()


async def find_first_model(client: HttpClient) -> str:
    """The first model that the server lists. Raises QuireError."""
    body = _WholeBody()
    request = client.endpoint.encode_request("GET", "/v1/models")
    try:
        async with asyncio.timeout(_MODELS_TIMEOUT_S):
            status = await client.exchange(request, body)
    except (AnswerError, OSError) as error:
        url = f"{client.endpoint.host}:{client.endpoint.port}"
        raise QuireError(f"{url} lists no models: {error or type(error).__name__}") from None
    if status != 200:
        raise QuireError(f"/v1/models was answered with HTTP {status}; --model names one without asking")
    try:
        models = msgspec.json.decode(body.data, type=_Models).data
    except msgspec.DecodeError as error:
        raise QuireError(f"/v1/models was answered with something else: {error}") from None
    if not models:
        raise QuireError("the server has no model")
    return models[0].id


async def _warm_up(client: HttpClient, request: bytes, options: Options) -> None:
    record, wants_vectors = RequestRecord(due_at=0.0), options.endpoint == "embeddings"
    failure = await send_request(client, request, record, options.timeout, wants_vectors=wants_vectors)
    if failure is not None:
        raise QuireError(f"the first requests failed, so nothing was measured: {failure}")


def format_report(options: Options, run: ServeRun, metrics: ServeMetrics) -> str:
    """The tables and the notes that say how to read them."""
    unit = "tokens" if metrics.is_counted_by_server else "pieces of text"
    goodput = metrics.request_goodput
    rows = [
        ["requests answered", f"{metrics.completed:,}"],
        ["requests failed", f"{metrics.failed:,}"],
        ["duration, s", f"{metrics.duration_s:.2f}"],
        ["most requests at a time", f"{metrics.max_concurrent_requests:,}"],
        ["prompt tokens", f"{metrics.total_input_tokens:,}"],
        [f"output {unit}", f"{metrics.total_output_tokens:,}"],
        ["requests/s", format_rate(metrics.request_throughput)],
        *([] if goodput is None else [["goodput, requests/s", format_rate(goodput)]]),
        [f"output {unit}/s", format_rate(metrics.output_throughput)],
        [f"prompt and output {unit}/s", format_rate(metrics.total_token_throughput)],
    ]
    latencies = [_format_latency(name, metrics.latencies[name]) for name in METRICS]
    return "\n".join(
        [
            format_table([f"{run.model}, {describe_load(options)}", ""], rows),
            "",
            format_table(["ms", "mean", "median", "p90", "p99", "max"], latencies),
            "",
            *_explain(options, run.result, metrics),
        ]
    )


def describe_load(options: Options) -> str:
    """One phrase: how many requests, and how they are sent."""
    limit = "" if options.max_concurrency is None else f", at most {options.max_concurrency} at a time"
    if math.isinf(options.request_rate):
        how = "all at once" if options.max_concurrency is None else f"{options.max_concurrency} users"
        return f"{options.num_prompts} requests, {how}"
    return f"{options.num_prompts} requests, {options.request_rate:g}/s (Poisson){limit}"


def _explain(options: Options, result: LoadResult, metrics: ServeMetrics) -> list[str]:
    if options.max_concurrency is not None and math.isinf(options.request_rate):
        notes = [
            "closed loop: a request is sent when an earlier one is answered, so a slow server is asked less; "
            "--request-rate shows the queueing"
        ]
    else:
        notes = ["open loop: times count from when a request was due, so waiting behind others is in them"]
    share = result.cpu_s / result.duration_s if result.duration_s > 0 else 0.0
    lags = ", ".join(f"{compute_lag_s(result, place) * 1e3:.1f}" for place in (0.5, 0.99, 1.0))
    notes.append(f"client: {share:.0%} of a core, its timers late by {lags} ms (median, p99, max)")
    if share > _BUSY_CPU_SHARE or compute_lag_s(result, 0.99) > _LATE_S:
        notes.append("the client was late itself, which is in these latencies: run it where a core is free")
    if not metrics.is_counted_by_server:
        notes.append("not every answer carried token counts, so pieces of text are counted instead")
    for reason, count in list(metrics.errors.items())[:_MAX_REASONS]:
        notes.append(f"failed, {count:,} times: {reason}")
    return notes


def compute_lag_s(result: LoadResult, share: float) -> float:
    """A percentile of how late the client's timers were."""
    return compute_percentile(sorted(result.lags_s) or [0.0], share)


def _format_latency(name: str, summary: LatencySummary | None) -> list[str]:
    heading = f"{METRICS[name]} ({name.upper()})"
    if summary is None:
        return [heading, *"-----"]
    figures = (summary.mean, summary.median, summary.p90, summary.p99, summary.max)
    return [heading, *(f"{figure:,.2f}" for figure in figures)]


def make_report(options: Options, run: ServeRun, metrics: ServeMetrics) -> dict[str, Any]:
    """Everything that was measured: the summary flat, then a list a request."""
    records, start = run.result.records, run.result.started_at
    is_unlimited = math.isinf(options.request_rate)
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "model_id": run.model,
        "base_url": options.base_url,
        "endpoint": PATHS[options.endpoint],
        "num_prompts": options.num_prompts,
        "request_rate": "inf" if is_unlimited else options.request_rate,
        "max_concurrency": options.max_concurrency,
        "seed": options.seed,
        "goodput_limits_ms": {name: limit * 1e3 for name, limit in parse_goodput(options.goodput).items()},
        **metrics.to_json(),
        "client_cpu_share": run.result.cpu_s / max(run.result.duration_s, 1e-9),
        "client_lags_ms": [lag * 1e3 for lag in run.result.lags_s],
        "due_s": [record.due_at - start for record in records],
        "sent_s": [record.sent_at - start for record in records],
        "ended_s": [record.ended_at - start for record in records],
        "input_lens": [record.num_prompt_tokens for record in records],
        "output_lens": [record.num_output_tokens for record in records],
        "ttfts": [None if r.first_at is None else r.first_at - r.due_at for r in records],
        "itls": [[b - a for a, b in pairwise(r.text_times)] for r in records],
        "errors": [record.error for record in records],
    }


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _WholeBody(AnswerReader):
    """Keeps a small answer."""

    def __init__(self) -> None:
        self.data = b""

    def take_body(self, status: int, data: bytes, now: float) -> None:  # noqa: ARG002
        self.data += data


def raise_file_limit() -> None:
    """A connection is a file; 1,024 of them are a usual soft limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
