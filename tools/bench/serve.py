"""`quire bench serve`: load against any OpenAI-compatible server, and what its users would have seen."""

from __future__ import annotations

import asyncio
import contextlib
import math
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from tqdm import tqdm

from ...ipc.errors import InputError, QuireError
from ..options import COUNT, INDEX, Check, option
from .http_stream import AnswerError, AnswerReader, Endpoint, HttpClient
from .load import LoadOptions, LoadResult, RequestRecord, run_load, send_request
from .machine import describe_machine, print_facts, write_json
from .prompts import FORMS, RANDOM, Ask, EndpointKind, LengthRange, make_random_asks, read_asks
from .serve_metrics import METRICS, ServeMetrics, compute_metrics, compute_percentile, measure, parse_goodput
from .table import format_rate, format_table

# Above this share of a core, or with timers this late, the client's own waiting shows in the latencies.
_BUSY_CPU_SHARE = 0.7
_LATE_S = 0.02
_MODELS_TIMEOUT_S = 30.0
_MAX_REASONS = 5
_STATISTICS = ("mean", "median", "p90", "p99", "max")


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
        "chat", "which API (%(default)s)", choices=tuple(FORMS)
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


def run(options: Options) -> int:
    """Run, print, write; returns 0 when every request was answered and 1 otherwise.

    Raises InputError before anything is sent, QuireError when the server cannot be asked at all.
    """
    endpoint = Endpoint.parse(options.base_url, options.api_key)
    path, limits_s = options.json, parse_goodput(options.goodput)
    if path is not None and (not Path(path).parent.is_dir() or Path(path).is_dir()):
        raise InputError("json", path, "a file name in a folder that exists")
    asks = _make_asks(options)
    machine = describe_machine()
    if options.api_key is not None:
        machine["command"] = machine["command"].replace(options.api_key, "...")
    _raise_file_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        model, result = runner.run(_ask_server(endpoint, options, asks))
    metrics = compute_metrics(result, limits_s)
    print_facts(machine)
    print(_format_report(options, model, result, metrics))
    write_json(
        path, _make_report(options, model, result, metrics) | {"date": machine["date"], "machine": machine}
    )
    return 0 if metrics.figures["failed"] == 0 else 1


def _make_asks(options: Options) -> list[Ask]:
    """Warm-ups, then those that are measured: none of these is a warm-up's, so that it is in no cache."""
    input_len, output_len = (
        LengthRange.parse(name, getattr(options, name)) for name in ("input_len", "output_len")
    )
    warmups = make_random_asks(options.num_warmups, input_len, output_len, f"warm-up/{options.seed}")
    if options.dataset == RANDOM:
        return warmups + make_random_asks(options.num_prompts, input_len, output_len, options.seed)
    asks = read_asks(options.dataset, options.endpoint, output_len, options.seed)
    return warmups + [asks[index % len(asks)] for index in range(options.num_prompts)]


async def _ask_server(endpoint: Endpoint, options: Options, asks: list[Ask]) -> tuple[str, LoadResult]:
    """The model that was asked, and what came of it."""
    client, form, kind = HttpClient(endpoint), FORMS[options.endpoint], options.endpoint
    load = LoadOptions(
        options.request_rate, options.max_concurrency, options.timeout, options.seed, form.reader
    )
    try:
        model = options.model or await _find_first_model(client)
        # Encoded beforehand: while the load runs, the client only sends and reads.
        bodies = [ask.encode(model, kind, options.temperature, options.ignore_eos) for ask in asks]
        requests = [endpoint.encode_request("POST", form.path, body) for body in bodies]
        for request in requests[: options.num_warmups]:
            failure = await send_request(client, request, RequestRecord(due_at=0.0), load)
            if failure is not None:
                raise QuireError(f"the first requests failed, so nothing was measured: {failure}")
        measured, is_watched = requests[options.num_warmups :], sys.stderr.isatty()
        with tqdm(
            total=len(measured), unit=" requests", disable=not is_watched, mininterval=0.5, leave=False
        ) as bar:
            return model, await run_load(client, measured, load, bar.update)
    finally:
        await client.close()


async def _find_first_model(client: HttpClient) -> str:
    """The first model that the server lists. Raises QuireError."""
    answer = AnswerReader()
    request = client.endpoint.encode_request("GET", "/v1/models")
    try:
        async with asyncio.timeout(_MODELS_TIMEOUT_S):
            status = await client.exchange(request, answer)
    except (AnswerError, OSError) as error:
        url = f"{client.endpoint.host}:{client.endpoint.port}"
        raise QuireError(f"{url} lists no models: {error or type(error).__name__}") from None
    if status != 200:
        raise QuireError(f"/v1/models was answered with HTTP {status}; --model names one without asking")
    try:
        models = msgspec.json.decode(answer.body, type=_Models).data
    except msgspec.DecodeError as error:
        raise QuireError(f"/v1/models was answered with something else: {error}") from None
    if not models:
        raise QuireError("the server has no model")
    return models[0].id


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def _format_report(options: Options, model: str, result: LoadResult, metrics: ServeMetrics) -> str:
    """The tables and the notes that say how to read them."""
    unit = "tokens" if metrics.is_counted_by_server else "pieces of text"
    labels = {
        "completed": "requests answered",
        "failed": "requests failed",
        "duration": "duration, s",
        "max_concurrent_requests": "most requests at a time",
        "total_input_tokens": "prompt tokens",
        "total_output_tokens": f"output {unit}",
        "request_throughput": "requests/s",
        "request_goodput": "goodput, requests/s",
        "output_throughput": f"output {unit}/s",
        "total_token_throughput": f"prompt and output {unit}/s",
    }
    figures = [(name, label, metrics.figures[name]) for name, label in labels.items()]
    rows = [[label, _format_figure(name, value)] for name, label, value in figures if value is not None]
    latencies = [
        [f"{heading} ({name.upper()})", *_format_latency(metrics.latencies[name])]
        for name, heading in METRICS.items()
    ]
    parts = [format_table([f"{model}, {_describe_load(options)}", ""], rows)]
    parts.append(format_table(["ms", *_STATISTICS], latencies))
    return "\n\n".join([*parts, "\n".join(_explain(options, result, metrics))])


def _format_figure(name: str, value: float) -> str:
    if name == "duration":
        return f"{value:.2f}"
    return f"{value:,}" if isinstance(value, int) else format_rate(value)


def _format_latency(summary: dict[str, float] | None) -> list[str]:
    return ["-" if summary is None else f"{summary[statistic]:,.2f}" for statistic in _STATISTICS]


def _describe_load(options: Options) -> str:
    """One phrase: how many requests, and how they are sent."""
    limit = "" if options.max_concurrency is None else f", at most {options.max_concurrency} at a time"
    if math.isinf(options.request_rate):
        how = "all at once" if options.max_concurrency is None else f"{options.max_concurrency} users"
        return f"{options.num_prompts} requests, {how}"
    return f"{options.num_prompts} requests, {options.request_rate:g}/s (Poisson){limit}"


def _explain(options: Options, result: LoadResult, metrics: ServeMetrics) -> list[str]:
    notes = ["open loop: times count from when a request was due, so waiting behind others is in them"]
    if options.max_concurrency is not None and math.isinf(options.request_rate):
        notes = [
            "closed loop: a request is sent when an earlier one is answered, so a slow server is asked less; "
            "--request-rate shows the queueing"
        ]
    share, lags_s = result.cpu_s / max(result.duration_s, 1e-9), sorted(result.lags_s) or [0.0]
    lags = [compute_percentile(lags_s, place) for place in (0.5, 0.99, 1.0)]
    late = ", ".join(f"{lag * 1e3:.1f}" for lag in lags)
    notes.append(f"client: {share:.0%} of a core, its timers late by {late} ms (median, p99, max)")
    if share > _BUSY_CPU_SHARE or lags[1] > _LATE_S:
        notes.append("the client was late itself, which is in these latencies: run it where a core is free")
    if not metrics.is_counted_by_server:
        notes.append("not every answer carried token counts, so pieces of text are counted instead")
    reasons = list(metrics.errors.items())[:_MAX_REASONS]
    return notes + [f"failed, {count:,} times: {reason}" for reason, count in reasons]


def _make_report(options: Options, model: str, result: LoadResult, metrics: ServeMetrics) -> dict[str, Any]:
    """Everything that was measured: the summary flat, then a list a request."""
    records, start = result.records, result.started_at
    is_unlimited = math.isinf(options.request_rate)
    return {
        "model_id": model,
        "base_url": options.base_url,
        "endpoint": FORMS[options.endpoint].path,
        "num_prompts": options.num_prompts,
        "request_rate": "inf" if is_unlimited else options.request_rate,
        "max_concurrency": options.max_concurrency,
        "seed": options.seed,
        "goodput_limits_ms": {name: limit * 1e3 for name, limit in parse_goodput(options.goodput).items()},
        **metrics.to_json(),
        "client_cpu_share": result.cpu_s / max(result.duration_s, 1e-9),
        "client_lags_ms": [lag * 1e3 for lag in result.lags_s],
        "due_s": [record.due_at - start for record in records],
        "sent_s": [record.sent_at - start for record in records],
        "ended_s": [record.ended_at - start for record in records],
        "input_lens": [record.num_prompt_tokens for record in records],
        "output_lens": [record.num_output_tokens for record in records],
        "ttfts": [None if r.first_at is None else r.first_at - r.due_at for r in records],
        "itls": [measure(record, "itl") for record in records],
        "errors": [record.error for record in records],
    }


def _raise_file_limit() -> None:
    """A connection is a file; 1,024 of them are a usual soft limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
