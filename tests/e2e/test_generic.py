"""The whole engine with a decoder that no family reads: tokens equal transformers', cut and preempted."""

from __future__ import annotations

import os
import random
import signal
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from crowd import Ask, Sequence, answer_through
from generated import find_tokens
from generic_checkpoints import VOCAB_SIZE, GenericCheckpoint, make_generic_checkpoint
from quire import LLM, SamplingParams
from small_pools import NUM_BLOCKS, fit_pool

LENGTHS, NUM_OUTPUT = (1, 5, 9, 16, 33, 70), 25
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT, ignore_eos=True, detokenize=False)


def draw_prompts() -> list[list[int]]:
    rng = random.Random(7)
    shared = [rng.randrange(3, VOCAB_SIZE) for _ in range(max(LENGTHS))]
    return [shared[:length] for length in LENGTHS]


def generate_with_transformers(checkpoint: GenericCheckpoint, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(NUM_OUTPUT):
        tokens.append(int(checkpoint.compute_reference(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def make_llm(checkpoint: GenericCheckpoint, backend: str, **others: Any) -> LLM:
    fields = fit_pool(
        model=str(checkpoint.folder),
        model_impl="transformers",
        skip_tokenizer_init=True,
        distributed_executor_backend=backend,
        dtype="float32",
        max_model_len=96,
        max_num_batched_tokens=16,
        block_size=8,
        num_gpu_blocks_override=NUM_BLOCKS,
    )
    return LLM(**(fields | others))


@pytest.mark.parametrize(
    ("model_type", "reason"), [("vaultgemma", ""), ("diffllama", "transformers' code computes")]
)
def test_greedy_tokens_equal_transformers_with_chunks_hits_and_preemption(
    model_type: str, reason: str, tmp_path: Path
) -> None:
    checkpoint, prompts = make_generic_checkpoint(tmp_path, model_type), draw_prompts()
    expected = [generate_with_transformers(checkpoint, prompt) for prompt in prompts]
    with make_llm(checkpoint, "uni") as llm:
        for _ in range(2):  # then with what the prefix cache holds
            assert find_tokens(llm.generate(prompts, PARAMS, use_tqdm=False)) == expected
        stats = llm.stats()
        assert llm.llm_engine.facts.batch_variance_reason.startswith(reason)
        assert bool(reason) == bool(llm.llm_engine.facts.batch_variance_reason)
    assert stats.num_preemptions_total > 0
    assert stats.prefix_cache_hits_total > 0


@pytest.mark.parametrize("model_type", ["vaultgemma", "diffllama"])
def test_a_prompt_cut_into_chunks_has_the_vector_of_its_last_token(model_type: str, tmp_path: Path) -> None:
    checkpoint, prompt = make_generic_checkpoint(tmp_path, model_type), draw_prompts()[-1]
    with torch.inference_mode():
        hidden = checkpoint.reference.model(torch.tensor([prompt]), use_cache=False)[0][0, -1]
    with make_llm(checkpoint, "uni", runner="pooling") as llm:
        (output,) = llm.embed([{"prompt_token_ids": prompt}], use_tqdm=False)
    torch.testing.assert_close(
        torch.tensor(output.outputs.embedding), hidden / hidden.norm(), rtol=0, atol=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["vaultgemma", "diffllama"])
def test_a_lost_worker_and_a_lost_core_change_no_greedy_token(model_type: str, tmp_path: Path) -> None:
    checkpoint, prompts = make_generic_checkpoint(tmp_path, model_type), draw_prompts()
    asks = [Ask("greedy", i, {"prompt_token_ids": prompt}, PARAMS) for i, prompt in enumerate(prompts)]
    with make_llm(checkpoint, "mp") as llm:

        def kill(role: str) -> None:
            os.kill(llm.llm_engine.facts.pids[role], signal.SIGKILL)

        answers = answer_through(llm, asks, [partial(kill, "worker"), partial(kill, "core")])
    for ask, prompt in zip(asks, prompts, strict=True):
        (sequence,) = cast(list[Sequence], answers[ask.name][0])
        assert sequence[0] == generate_with_transformers(checkpoint, prompt)
