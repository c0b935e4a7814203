"""`quire bench grammar`: what a JSON schema costs the requests that have one, their neighbours and a compile.

Everything is a ratio within one run, in rounds of alternating order.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...frontend.formats.schemas.grammar_text import make_grammar_text
from ...frontend.llm import LLM
from ...frontend.models.families import read_model_spec
from ...ipc.errors import QuireError
from ...ipc.params.sampling_params import SamplingParams
from ...ipc.params.structured_outputs import StructuredOutputsParams
from ...ipc.spec.config import ModelConfig
from .byte_tokenizer import EOS_TOKEN_ID, write_tokenizer
from .machine import describe_machine, format_machine
from .model_configs import BENCH_MODELS
from .models import ensure_model
from .table import format_rate, format_table
from .workloads import BenchRequest, make_workload

WORKLOAD_OF = {"tiny": "W4", "small": "W2"}
NUM_COMPILED = 300
NUM_SCHEMAS = 8  # that the requests of a round share
_NUM_NEIGHBOURS = 31
_PERSON: dict[str, Any] = {
    "name": {"type": "string"},
    "age": {"type": "integer"},
    "is_kind": {"type": "boolean"},
    "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
}


def run_grammar(models: list[str], num_rounds: int) -> int:
    """Measure and print; returns 0."""
    print(format_machine(describe_machine()) + "\n")
    rows: list[list[str]] = []
    for model in models:
        with tempfile.TemporaryDirectory(prefix="quire-bench-") as scratch:
            folder = make_folder(model, Path(scratch))
            rows += _measure_rates(folder, model, num_rounds)
            compile_ms = _measure_compiles(folder, model)
        print(
            f"{model}: {NUM_COMPILED} schemas compile in {statistics.median(compile_ms):.2f} ms (p50), "
            f"{statistics.quantiles(compile_ms, n=100)[-1]:.2f} ms (p99), {max(compile_ms):.2f} ms (most)"
        )
    print("\n" + format_table(["tokens/s", "free", "with schemas", "ratio", "lowest", "highest"], rows))
    return 0


def make_folder(model: str, scratch: Path) -> Path:
    """The bench model with a tokenizer whose tokens have texts."""
    source, folder = ensure_model(model), scratch / model
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).symlink_to(source / name)
    write_tokenizer(folder, BENCH_MODELS[model]["vocab_size"])
    return folder


def _measure_rates(folder: Path, model: str, num_rounds: int) -> list[list[str]]:
    name = WORKLOAD_OF[model]
    vocab_size = BENCH_MODELS[model]["vocab_size"]
    with LLM(str(folder), log_level="WARNING", enable_prefix_caching=False) as llm:

        def run_all(contents: str, has_schemas: bool) -> float:
            requests = make_workload(name, vocab_size, contents).requests
            return _run(llm, requests, [has_schemas] * len(requests))[0]

        def run_beside(contents: str, has_schemas: bool) -> float:
            first = make_workload("W1", vocab_size, contents).requests[0]
            requests = [first] * (1 + _NUM_NEIGHBOURS)
            return _run(llm, requests, [False] + [has_schemas] * _NUM_NEIGHBOURS)[1]

        return [
            _compare(f"{model}, {name}", run_all, num_rounds),
            _compare(f"{model}, one free beside {_NUM_NEIGHBOURS}", run_beside, num_rounds),
        ]


def _compare(title: str, run: Callable[[str, bool], float], num_rounds: int) -> list[str]:
    """A row of the table."""
    rates: dict[bool, list[float]] = {False: [], True: []}
    for has_schemas in rates:
        run("warm-up", has_schemas)
    for number in range(num_rounds):
        for has_schemas in (False, True) if number % 2 else (True, False):
            rates[has_schemas].append(run(f"round {number}", has_schemas))
    ratios = [one / other for one, other in zip(rates[True], rates[False], strict=True)]
    medians = [format_rate(statistics.median(rates[kind])) for kind in (False, True)]
    return [title, *medians, *(f"{pick(ratios):.3f}" for pick in (statistics.median, min, max))]


def _run(llm: LLM, requests: list[BenchRequest], has_schema: list[bool]) -> tuple[float, float]:
    """Tokens/s of all requests together, and of the first alone from its first token on."""
    params = [
        SamplingParams(
            temperature=1.0,
            seed=number,
            max_tokens=request.num_output_tokens,
            ignore_eos=True,
            detokenize=False,
            structured_outputs=_pick_schema(number) if constrained else None,
        )
        for number, (request, constrained) in enumerate(zip(requests, has_schema, strict=True))
    ]
    prompts: list[Any] = [{"prompt_token_ids": request.prompt_token_ids} for request in requests]
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    for output, request in zip(outputs, requests, strict=True):
        if len(output.outputs[0].token_ids) != request.num_output_tokens:
            raise QuireError(f"an answer ended early: {output.error or output.outputs[0].finish_reason}")
    times = outputs[0].metrics
    assert times is not None
    assert times.first_token_ts is not None
    assert times.last_token_ts is not None
    span = times.last_token_ts - times.first_token_ts
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return num_tokens / seconds, (requests[0].num_output_tokens - 1) / span


def _pick_schema(number: int) -> StructuredOutputsParams:
    return StructuredOutputsParams(json=make_schema(f"person {number % NUM_SCHEMAS}"))


def make_schema(title: str) -> dict[str, Any]:
    """A list that no answer of a workload comes to the end of; another title is another grammar."""
    properties = _PERSON | {"kind": {"enum": ["child", "parent", title]}}
    person = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "array", "items": person, "minItems": 1000}


def _measure_compiles(folder: Path, model: str) -> list[float]:
    """Milliseconds from a text to a row's matcher in a worker, of schemas that are all new to it."""
    from ...worker.sampling.grammars import Grammars

    spec = read_model_spec(json.loads((folder / "config.json").read_text()))
    grammars = Grammars(
        ModelConfig(
            model=str(folder),
            served_model_name=model,
            tokenizer=str(folder),
            spec=spec,
            eos_token_ids=(EOS_TOKEN_ID,),
        )
    )
    rng = random.Random(0)
    drawn = [StructuredOutputsParams(json=_draw_schema(rng, 3)) for _ in range(1 + NUM_COMPILED)]
    times: list[float] = []
    for text in [make_grammar_text(params).text for params in drawn]:
        started = time.perf_counter()
        matcher = grammars.make_matcher(text, [])
        times.append((time.perf_counter() - started) * 1e3)
        if matcher.failure:
            raise QuireError(matcher.failure)
    return times[1:]  # the first brings the tokenizer's trie


def _draw_schema(rng: random.Random, depth: int) -> dict[str, Any]:
    """An object of up to 8 properties, nested up to `depth`, with the usual bounds."""
    leaves: list[dict[str, Any]] = [
        {"type": "string", "maxLength": rng.randint(1, 200)},
        {"type": "string", "pattern": f"^[A-Z]{{{rng.randint(1, 4)}}}-[0-9]{{2,{rng.randint(3, 9)}}}$"},
        {"type": "string", "format": rng.choice(("date-time", "email", "uuid", "ipv4"))},
        {"type": "integer", "minimum": rng.randint(-99, 0), "maximum": rng.randint(1, 10_000)},
        {"type": "number"},
        {"type": ["boolean", "null"]},
        {"enum": [f"value {number}" for number in range(rng.randint(2, 60))]},
    ]
    properties: dict[str, Any] = {}
    for number in range(rng.randint(1, 8)):
        inner = _draw_schema(rng, depth - 1) if depth and rng.random() < 0.3 else rng.choice(leaves)
        properties[f"field_{number}"] = (
            {"type": "array", "items": inner, "maxItems": 9} if rng.random() < 0.2 else inner
        )
    required = [name for name in properties if rng.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
