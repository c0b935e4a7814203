"""Greedy tokens and logprobs of the whole engine against transformers, on random tiny checkpoints in float32.

The engine runs in this process ("uni"), which is the same core, executor interface and worker as in the
default chain without the sockets; test_process_chain.py holds the two equal.
"""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import RECIPES, Checkpoint, make_checkpoint
from generated import find_tokens
from quire import LLM, SamplingParams
from quire.kernels.program import native
from small_pools import NUM_BLOCKS, fit_pool

# Lengths around block borders, and longer than the trained length of the scaled ropes.
PROMPT_LENGTHS = (1, 3, 15, 16, 17, 31, 33, 47, 64, 70)
# Those that begin with few tokens grow most, beyond what windows free.
OUTPUT_LENGTHS = (40, 40, 40, 40, 24, 9, 5, 2, 7, 18)

ENGINES: dict[str, dict[str, Any]] = {
    "one token a step": {"max_num_batched_tokens": 1, "max_num_seqs": 1},
    "chunks of 7": {"max_num_batched_tokens": 7},
    "chunks of 16": {"max_num_batched_tokens": 16},
    "whole prompts": {"max_num_batched_tokens": 512},
    "no prefix cache": {"enable_prefix_caching": False, "max_num_batched_tokens": 64},
    "a pool that forces preemption": {
        "num_gpu_blocks_override": NUM_BLOCKS,
        "block_size": 8,
        "max_num_batched_tokens": 16,
    },
    "lock-step": {"async_scheduling": False, "max_num_batched_tokens": 32},
    "small blocks": {"block_size": 8, "max_num_batched_tokens": 32},
}
# How steps are cut does not depend on the family, but for its operations on rows: every way meets the
# plainest family and the one with windows and caps; the others meet the ways that differ most.
EVERY_WAY = ("llama", "gemma2")
MAIN_WAYS = ("chunks of 7", "a pool that forces preemption")
PAIRS = [
    pytest.param(family, way, marks=[] if family in EVERY_WAY or way in MAIN_WAYS else [pytest.mark.slow])
    for way in ENGINES
    for family in RECIPES
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    root: Path = tmp_path_factory.mktemp("golden")
    return {name: make_checkpoint(root / name, recipe) for name, recipe in RECIPES.items()}


@pytest.fixture(scope="module")
def expected(checkpoints: dict[str, Checkpoint]) -> dict[str, list[list[int]]]:
    return {
        name: [
            generate_with_transformers(checkpoint, prompt, length)
            for prompt, length in zip(make_prompts(checkpoint), OUTPUT_LENGTHS, strict=True)
        ]
        for name, checkpoint in checkpoints.items()
    }


def make_prompts(checkpoint: Checkpoint) -> list[list[int]]:
    """Prompts of odd lengths; the later ones share the beginning of the longest."""
    rng = random.Random(7)
    shared = [rng.randrange(3, checkpoint.spec.vocab_size) for _ in range(max(PROMPT_LENGTHS))]
    prompts = [[rng.randrange(3, checkpoint.spec.vocab_size) for _ in range(n)] for n in PROMPT_LENGTHS]
    prompts[-3:] = [shared[:length] for length in PROMPT_LENGTHS[-3:]]
    return prompts


def generate_with_transformers(checkpoint: Checkpoint, prompt: list[int], length: int) -> list[int]:
    with torch.inference_mode():
        forget_length(checkpoint)
        tokens = checkpoint.reference.generate(
            torch.tensor([prompt]),
            max_new_tokens=length,
            min_new_tokens=length,
            do_sample=False,
            pad_token_id=0,
        )
    return tokens[0, len(prompt) :].tolist()


def forget_length(checkpoint: Checkpoint) -> None:
    """transformers' dynamic rope keeps the longest length it has seen until a short sequence comes."""
    checkpoint.reference(torch.tensor([[3]]))


def make_llm(checkpoint: Checkpoint, **engine_args: Any) -> LLM:
    fields = fit_pool(
        model=str(checkpoint.folder),
        skip_tokenizer_init=True,
        distributed_executor_backend="uni",
        max_model_len=128,
        dtype="float32",
        **engine_args,
    )
    return LLM(**fields)


def greedy(length: int, **params: Any) -> SamplingParams:
    # eos is masked rather than ignored, as min_new_tokens does in transformers
    return SamplingParams(temperature=0, max_tokens=length, min_tokens=length, detokenize=False, **params)


@pytest.mark.parametrize(("family", "engine"), PAIRS)
def test_greedy_tokens_equal_transformers(
    family: str, engine: str, checkpoints: dict[str, Checkpoint], expected: dict[str, list[list[int]]]
) -> None:
    checkpoint = checkpoints[family]
    with make_llm(checkpoint, **ENGINES[engine]) as llm:
        params = [greedy(length) for length in OUTPUT_LENGTHS]
        prompts = make_prompts(checkpoint)
        assert find_tokens(llm.generate(prompts, params, use_tqdm=False)) == expected[family]
        again = llm.generate(prompts, params, use_tqdm=False)  # now with whatever the prefix cache holds
        assert find_tokens(again) == expected[family]
        stats = llm.stats()
    if "num_gpu_blocks_override" in ENGINES[engine]:
        assert stats.num_preemptions_total > 0
    if engine == "whole prompts":
        assert all(output.num_cached_tokens for output in again[-3:])
    if engine == "no prefix cache":
        assert stats.prefix_cache_hits_total == 0


@pytest.mark.parametrize("family", RECIPES)
def test_without_the_native_kernels_tokens_equal_transformers_too(
    family: str,
    checkpoints: dict[str, Checkpoint],
    expected: dict[str, list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunks, preemption and prefix hits at once; `tools/check kernels-off` is the whole matrix."""
    monkeypatch.setenv(native.SWITCH, "0")
    monkeypatch.setattr(native, "load_library", functools.cache(native.load_library.__wrapped__))
    engine = ENGINES["a pool that forces preemption"]
    with make_llm(checkpoints[family], **engine) as llm:
        params = [greedy(length) for length in OUTPUT_LENGTHS]
        prompts = make_prompts(checkpoints[family])
        assert find_tokens(llm.generate(prompts, params, use_tqdm=False)) == expected[family]
        stats = llm.stats()
        assert "torch multiplies" in llm.llm_engine.facts.batch_variance_reason
    assert stats.num_preemptions_total > 0
    assert stats.prefix_cache_hits_total > 0


@pytest.mark.parametrize("family", RECIPES)
def test_logprobs_equal_transformers(
    family: str, checkpoints: dict[str, Checkpoint], expected: dict[str, list[list[int]]]
) -> None:
    checkpoint = checkpoints[family]
    prompt = make_prompts(checkpoint)[-1]
    with make_llm(checkpoint, max_num_batched_tokens=16) as llm:
        params = greedy(OUTPUT_LENGTHS[-1], logprobs=3, prompt_logprobs=2)
        [output] = llm.generate([prompt], params, use_tqdm=False)
    completion = output.outputs[0]
    assert list(completion.token_ids) == expected[family][-1]
    # One forward pass a prefix: with dynamic rope the length seen decides the rotation, as in generate.
    sequence = prompt + expected[family][-1]
    assert completion.logprobs is not None
    assert output.prompt_logprobs is not None
    # Derived as in test_models.tolerance: float32 rounding over the sums of two layers, relative to the
    # largest logit (here below 8), times 8 for the spread; log_softmax adds nothing of weight.
    atol = 8 * torch.finfo(torch.float32).eps * checkpoint.num_terms**0.5 * 8
    with torch.inference_mode():
        forget_length(checkpoint)
        prompt_reference = checkpoint.reference(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert output.prompt_logprobs[0] is None
    for position, entry in enumerate(output.prompt_logprobs[1:], start=1):
        assert entry is not None
        assert prompt[position] in entry
        for token_id, logprob in entry.items():
            assert logprob.logprob == pytest.approx(prompt_reference[position - 1, token_id].item(), abs=atol)
    if RECIPES[family].rope == "dynamic":
        return  # later positions depend on transformers' cached rotations; their tokens were compared above
    with torch.inference_mode():
        reference = checkpoint.reference(torch.tensor([sequence])).logits[0].log_softmax(-1)
    total = 0.0
    for i, entry in enumerate(completion.logprobs):
        row = reference[len(prompt) - 1 + i].clone()
        for token_id, logprob in entry.items():
            assert logprob.logprob == pytest.approx(row[token_id].item(), abs=atol)
        total += entry[completion.token_ids[i]].logprob
    assert completion.cumulative_logprob == pytest.approx(total)
