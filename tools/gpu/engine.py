"""Is the engine fast on this GPU? Decode at fixed batches beside the time that reading its bytes takes, and
nano-vllm's workload of 256 requests, on made-up weights.

A decode step is timed as the difference between runs of few and of many tokens over the steps between them.
"""

from __future__ import annotations

import time
from random import Random
from typing import Any

import torch

from ..bench.ceilings import MEMORY_READ_BYTES, measure_read_rate
from ..bench.model_facts import ModelFacts, read_model_facts
from ..bench.models import ensure_model
from ..bench.workloads import BenchRequest, make_workload
from .rows import Row, Say, judge

_PROMPT_LEN = 128
_FEW_TOKENS, _MANY_TOKENS = 16, 144
_MAX_MODEL_LEN = 4096
# (batch, least fraction of the floor that is wanted)
_SMALL_BATCHES = ((1, 0.60), (256, 0.90))
_LARGE_BATCHES = ((1, 0.85),)


def bench_small_engine(say: Say, device: str = "cuda", model: str = "qwen3-0.6b") -> None:
    """The shape of Qwen3-0.6B: decode at 1 and 256, with graphs and without, and 256 mixed requests."""
    facts = read_model_facts(model, ensure_model(model), is_dummy=True)
    read_rate = _measure_read_rate(say, device)
    with _make_llm(facts, device) as llm:
        for batch, least in _SMALL_BATCHES:
            say(_bench_decode(llm, facts, batch, read_rate, least))
            say(_bench_decode(llm, facts, batch, read_rate, None, is_filtered=True))
        say(_bench_workload(llm, facts))
    with _make_llm(facts, device, enforce_eager=True) as llm:
        row = _bench_decode(llm, facts, 1, read_rate, least=None)
        say(Row(f"{row.name}, without graphs", row.value))


def bench_large_engine(say: Say, device: str = "cuda", model: str = "llama-8b") -> None:
    """The shape of Llama-3.1-8B: decode of one request."""
    facts = read_model_facts(model, ensure_model(model), is_dummy=True)
    read_rate = _measure_read_rate(say, device)
    with _make_llm(facts, device) as llm:
        for batch, least in _LARGE_BATCHES:
            say(_bench_decode(llm, facts, batch, read_rate, least))


def _measure_read_rate(say: Say, device: str) -> float:
    read_rate = measure_read_rate(device, MEMORY_READ_BYTES)
    if device != "cpu":
        torch.cuda.empty_cache()  # the worker counts what is free
    say(Row("read", f"{read_rate / 1e9:,.0f} GB/s"))
    return read_rate


def _make_llm(facts: ModelFacts, device: str, **engine_args: Any) -> Any:
    from ...frontend.llm import LLM

    return LLM(
        model=str(facts.folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        device=device,
        max_model_len=_MAX_MODEL_LEN,
        max_num_seqs=256,
        log_level="WARNING",
        **engine_args,
    )


def _bench_decode(
    llm: Any, facts: ModelFacts, batch: int, read_rate: float, least: float | None, is_filtered: bool = False
) -> Row:
    """A decode step of `batch` requests as a fraction of the time that reading weights and KV takes.

    No two prompts share a block, so that no request's keys are in the cache because of another one's.
    """
    prompts = [_make_prompt(facts, number) for number in range(batch)]
    few = [BenchRequest(prompt, _FEW_TOKENS) for prompt in prompts]
    many = [BenchRequest(prompt, _MANY_TOKENS) for prompt in prompts]
    _run(llm, many, is_filtered)  # compiles, and captures the graph
    short = min(_run(llm, few, is_filtered) for _ in range(3))
    long = min(_run(llm, many, is_filtered) for _ in range(3))
    step_s = (long - short) / (_MANY_TOKENS - _FEW_TOKENS)
    mean_len = _PROMPT_LEN + (_FEW_TOKENS + _MANY_TOKENS) / 2
    step_bytes = facts.size.step_bytes + batch * mean_len * facts.size.kv_bytes_per_token
    fraction = step_bytes / read_rate / step_s
    name = f"{facts.name} decode, batch {batch}" + (", top-k 20, top-p 0.95" if is_filtered else "")
    detail = f"{step_s * 1e3:.2f} ms a step, {batch / step_s:,.0f} tokens/s"
    if least is None:
        return Row(name, f"{fraction:.0%} ({detail})")
    return judge(name, fraction, least, detail)


def _make_prompt(facts: ModelFacts, number: int) -> list[int]:
    """Token ids that differ from every other prompt's from the first block on."""
    random = Random(number)
    return [random.randrange(16, facts.vocab_size) for _ in range(_PROMPT_LEN)]


def _bench_workload(llm: Any, facts: ModelFacts) -> Row:
    # All 256 requests, whose lengths are those of the measured ones: every size of graph has been replayed.
    _run(llm, make_workload("W5", facts.vocab_size, "warm-up").requests)
    workload = make_workload("W5", facts.vocab_size, "round 1")
    seconds = _run(llm, workload.requests)
    rate = workload.num_output_tokens / seconds
    return Row(
        f"{facts.name}, 256 requests 100-1024 in and out", f"{rate:,.0f} tokens/s out, {seconds:.1f} s"
    )


def _run(llm: Any, requests: list[BenchRequest], is_filtered: bool = False) -> float:
    """Seconds of one `generate`, greedy or sampled as Qwen3's generation_config.json says."""
    from ...ipc.sampling_params import SamplingParams

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
