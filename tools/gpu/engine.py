"""Is the engine fast on this GPU? Decode at fixed batches beside what the cost model says, and nano-vllm's
workload of 256 requests, alone and beside other engines, on made-up weights.

A decode step is timed as the difference between runs of few and of many tokens over the steps between them.
"""

from __future__ import annotations

import time
from random import Random
from typing import Any

from ..bench.bench_model import BenchModel, load_bench_model
from ..bench.cost_model import Card, StepShape, compute_step_work
from ..bench.workloads import WORKLOADS, BenchRequest, make_workload
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
    say: Say,
    device: str = "cuda",
    model: str = "qwen3-0.6b",
    batches: Batches = _SMALL_BATCHES,
    workload: str = "W5",
) -> None:
    """The shape of Qwen3-0.6B: decode at some batches, with graphs and without, and 256 mixed requests."""
    bench, card = load_bench_model(model), find_card(say, device)
    with _make_llm(bench, device) as llm:
        for batch, most in batches:
            say(_bench_decode(llm, bench, batch, card, most))
            say(_bench_decode(llm, bench, batch, card, None, is_filtered=True))
        say(_bench_workload(llm, bench, workload))
    with _make_llm(bench, device, enforce_eager=True) as llm:
        row = _bench_decode(llm, bench, 1, card, None)
        say(Row(f"{row.name}, without graphs", row.value))


def bench_large_engine(
    say: Say, device: str = "cuda", model: str = "llama-8b", batches: Batches = _LARGE_BATCHES
) -> None:
    """The shape of Llama-3.1-8B: decode of one request."""
    bench, card = load_bench_model(model), find_card(say, device)
    with _make_llm(bench, device) as llm:
        for batch, most in batches:
            say(_bench_decode(llm, bench, batch, card, most))


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


def _bench_decode(
    llm: Any,
    bench: BenchModel,
    batch: int,
    card: Card,
    most: float | None,
    is_filtered: bool = False,
) -> Row:
    """A decode step of `batch` requests beside its floor and the estimate.

    No two prompts share a block, so that no request's keys are in the cache because of another one's.
    """
    prompts = [_make_prompt(bench, number) for number in range(batch)]
    few = [BenchRequest(prompt, _FEW_TOKENS) for prompt in prompts]
    many = [BenchRequest(prompt, _MANY_TOKENS) for prompt in prompts]
    _run(llm, many, is_filtered)  # compiles, and captures the graph
    short = min(_run(llm, few, is_filtered) for _ in range(3))
    long = min(_run(llm, many, is_filtered) for _ in range(3))
    step_s = (long - short) / (_MANY_TOKENS - _FEW_TOKENS)
    mean_len = _PROMPT_LEN + (_FEW_TOKENS + _MANY_TOKENS) // 2
    work = compute_step_work(bench.spec, "bfloat16", StepShape(batch, mean_len))
    name = f"{bench.name} decode, batch {batch}" + (", top-k 20, top-p 0.95" if is_filtered else "")
    return judge_step(f"{name}, step", step_s, work, card, most)


def _make_prompt(bench: BenchModel, number: int) -> list[int]:
    """Token ids that differ from every other prompt's from the first block on."""
    random = Random(number)
    return [random.randrange(16, bench.spec.vocab_size) for _ in range(_PROMPT_LEN)]


def _bench_workload(llm: Any, bench: BenchModel, name: str) -> Row:
    # All requests, whose lengths are those of the measured ones: every size of graph has been replayed.
    _run(llm, make_workload(name, bench.spec.vocab_size, "warm-up").requests)
    workload = make_workload(name, bench.spec.vocab_size, "round 1")
    seconds = _run(llm, workload.requests)
    rate = workload.num_output_tokens / seconds
    return Row(f"{bench.name}, {WORKLOADS[name].summary}", f"{rate:,.0f} tokens/s out, {seconds:.1f} s")


def _run(llm: Any, requests: list[BenchRequest], is_filtered: bool = False) -> float:
    """Seconds of one `generate`, greedy or sampled as Qwen3's generation_config.json says."""
    from ...ipc.params.sampling_params import SamplingParams

    prompts = [{"prompt_token_ids": request.prompt_token_ids} for request in requests]
    how = {"temperature": 0.6, "top_k": 20, "top_p": 0.95} if is_filtered else {"temperature": 0.0}
    params = [
        SamplingParams(
            **how, max_tokens=request.num_output_tokens, ignore_eos=True, detokenize=False, seed=number
        )
        for number, request in enumerate(requests)
    ]
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start
