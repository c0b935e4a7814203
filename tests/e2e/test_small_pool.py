"""Mixed requests under a KV pool so small that preemption is the rule, against a large pool.

The full thousand is marked slow; `pytest -m slow tests/e2e/test_small_pool.py` runs it.
"""

from __future__ import annotations

import random

import pytest
from quire import LLM, RequestOutput, SamplingParams

WORDS = ("once", "upon", "a", "time", "the", "little", "fox", "went", "to", "park", "found", "red", "ball")
FULL = pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])


def make_requests(count: int) -> tuple[list[str], list[SamplingParams]]:
    """Prompts that partly share their beginnings; of every kind of sampling."""
    rng = random.Random(2026)
    prompts: list[str] = []
    params: list[SamplingParams] = []
    for i in range(count):
        shared = "Once upon a time, there was a small fox who lived near a lake. " * (i % 3)
        prompts.append(shared + " ".join(rng.choices(WORDS, k=rng.randint(1, 20))))
        kind = i % 6
        params.append(
            SamplingParams(
                temperature=0.0 if kind < 2 else rng.uniform(0.5, 1.5),
                seed=i,
                top_k=[0, 5, 50][i % 3] if kind else 0,
                top_p=0.9 if kind == 3 else 1.0,
                repetition_penalty=1.2 if kind == 4 else 1.0,
                presence_penalty=0.5 if kind == 5 else 0.0,
                n=2 if i % 50 == 0 else 1,
                logprobs=2 if i % 20 == 0 else None,
                stop=["park"] if kind == 2 else None,
                min_tokens=rng.randint(0, 4),
                max_tokens=rng.randint(4, 48),
                ignore_eos=kind == 1,
            )
        )
    return prompts, params


def run(count: int, **engine_args: object) -> tuple[list[RequestOutput], int, str | None]:
    prompts, params = make_requests(count)
    with LLM(max_model_len=128, dtype="float32", distributed_executor_backend="uni", **engine_args) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        llm.reset_prefix_cache()
        return outputs, llm.stats().num_preemptions_total, llm.llm_engine.check_integrity()


@pytest.mark.parametrize("count", [60, FULL])
def test_requests_in_a_tiny_pool_equal_those_in_a_large_one(count: int) -> None:
    large, num_preemptions, problems = run(count, max_num_seqs=256)
    assert num_preemptions == 0
    assert not problems
    small, num_preemptions, problems = run(
        count, num_gpu_blocks_override=20, max_num_seqs=32, max_num_batched_tokens=96, block_size=8
    )
    assert num_preemptions > count / 20
    assert not problems
    for one, other in zip(large, small, strict=True):
        assert [c.token_ids for c in one.outputs] == [c.token_ids for c in other.outputs]
        assert [c.text for c in one.outputs] == [c.text for c in other.outputs]
        assert [c.finish_reason for c in one.outputs] == [c.finish_reason for c in other.outputs]
