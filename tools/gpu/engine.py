"""Is the engine fast on this GPU? Decode of made-up weights beside what the cost model says.

A decode step is timed as the difference between runs of few and of many tokens over the steps between them.
"""

from __future__ import annotations

import time
from random import Random
from typing import Any

from ..bench.bench_model import BenchModel, load_bench_model
from ..bench.cost_model import Card, StepShape, compute_step_work
from .correctness import generate, make_greedy
from .rows import Row, Say
from .targets import find_card, judge_step

_PROMPT_LEN = 128
_FEW_TOKENS, _MANY_TOKENS = 16, 144
_MAX_MODEL_LEN = 4096
Batches = tuple[tuple[int, float], ...]
# (batch, most times the estimate)
_SMALL_BATCHES = ((1, 1.2), (8, 1.2), (32, 1.2), (64, 1.2), (256, 1.05))
_LARGE_BATCHES = ((1, 0.97),)


def bench_small_engine(
    say: Say, device: str = "cuda", model: str = "qwen3-0.6b", batches: Batches = _SMALL_BATCHES
) -> None:
    """Decode in the shape of Qwen3-0.6B, or another model's."""
    bench, card = load_bench_model(model), find_card(say, device)
    with _make_llm(bench, device) as llm:
        for batch, most in batches:
            say(_bench_decode(llm, bench, batch, card, most))


def bench_large_engine(say: Say) -> None:
    """Decode of one request in the shape of Llama-3.1-8B."""
    bench_small_engine(say, model="llama-8b", batches=_LARGE_BATCHES)


def bench_attention_backend(
    say: Say, name: str, device: str = "cuda", model: str = "qwen3-0.6b", batches: tuple[int, ...] = (1, 64)
) -> None:
    """Decode with another attention than the usual, if that is what computes."""
    bench, card = load_bench_model(model), find_card(say, device)
    with _make_llm(bench, device, attention_backend=name) as llm:
        used = llm.llm_engine.facts.attention_backend
        say(Row(f"{name} in an engine", f"attention is {used}'s", "its own", used == name.lower()))
        for batch in batches:
            row = _bench_decode(llm, bench, batch, card, None)
            say(Row(f"{row.name}, attention by {used}", row.value))


def _make_llm(bench: BenchModel, device: str, **engine_args: Any) -> Any:
    from ...frontend.llm import LLM

    return LLM(
        model=str(bench.path),
        load_format="dummy",
        skip_tokenizer_init=True,
        device=device,
        max_model_len=min(_MAX_MODEL_LEN, bench.spec.max_position_embeddings),
        max_num_seqs=256,
        log_level="WARNING",
        **engine_args,
    )


def _bench_decode(llm: Any, bench: BenchModel, batch: int, card: Card, most: float | None) -> Row:
    """A decode step of `batch` requests beside its floor and the estimate.

    No two prompts share a block, so that no request's keys are in the cache because of another one's.
    """
    prompts = [_make_prompt(bench, number) for number in range(batch)]
    _run(llm, prompts, _MANY_TOKENS)  # compiles, and captures the graph
    short, long = (min(_run(llm, prompts, count) for _ in range(3)) for count in (_FEW_TOKENS, _MANY_TOKENS))
    step_s = (long - short) / (_MANY_TOKENS - _FEW_TOKENS)
    mean_len = _PROMPT_LEN + (_FEW_TOKENS + _MANY_TOKENS) // 2
    work = compute_step_work(bench.spec, "bfloat16", StepShape(batch, mean_len))
    return judge_step(f"{bench.name} decode, batch {batch}, step", step_s, work, card, most)


def _make_prompt(bench: BenchModel, number: int) -> list[int]:
    """Token ids that differ from every other prompt's from the first block on."""
    random = Random(number)
    return [random.randrange(16, bench.spec.vocab_size) for _ in range(_PROMPT_LEN)]


def _run(llm: Any, prompts: list[list[int]], num_tokens: int) -> float:
    """Seconds of one greedy `generate`."""
    start = time.perf_counter()
    generate(llm, prompts, make_greedy(num_tokens))
    return time.perf_counter() - start
