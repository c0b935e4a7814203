"""Beam search of the whole engine against transformers, on random tiny checkpoints in float32."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from checkpoints import RECIPES, Checkpoint, make_checkpoint
from quire import LLM, BeamSearchOutput, BeamSearchParams
from quire.ipc.errors import SamplingParamsError

MAX_TOKENS = 16
SEARCHES: dict[str, dict[str, Any]] = {
    "narrow": {"beam_width": 2},
    "four": {"beam_width": 4},
    "one at a time": {"beam_width": 1},
    "sums": {"beam_width": 4, "length_penalty": 0.0, "early_stopping": "never"},
    "long ones": {"beam_width": 5, "length_penalty": 2.0, "early_stopping": "never"},
    "the first to end": {"beam_width": 3, "early_stopping": True},
    "short ones": {"beam_width": 3, "length_penalty": -1.0},
    "to the end": {"beam_width": 4, "ignore_eos": True},
}
PROMPT_LENGTHS = (1, 8, 17)
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {"max_num_seqs": 32},
    "a pool that loses beams' blocks": {"num_gpu_blocks_override": 24, "max_num_batched_tokens": 16},
    "no prefix cache": {"enable_prefix_caching": False, "async_scheduling": False},
}


@pytest.fixture(scope="module", params=["llama", pytest.param("gemma2", marks=pytest.mark.slow)])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint(tmp_path_factory.mktemp("beams") / request.param, RECIPES[request.param])


@pytest.fixture(scope="module")
def expected(checkpoint: Checkpoint) -> dict[str, list[list[tuple[list[int], float]]]]:
    return {
        name: [search_with_transformers(checkpoint, prompt, **search) for prompt in make_prompts(checkpoint)]
        for name, search in SEARCHES.items()
    }


def make_prompts(checkpoint: Checkpoint) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, checkpoint.spec.vocab_size) for _ in range(n)] for n in PROMPT_LENGTHS]


def search_with_transformers(
    checkpoint: Checkpoint,
    prompt: list[int],
    beam_width: int,
    *,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    ignore_eos: bool = False,
) -> list[tuple[list[int], float]]:
    """(output with its end of sequence, score) of each sequence."""
    eos = None if ignore_eos else list(checkpoint_eos(checkpoint))
    if beam_width == 1:  # as transformers calls greedy search, which has no scores
        return []
    with torch.inference_mode():
        found = checkpoint.reference.generate(
            torch.tensor([prompt]),
            num_beams=beam_width,
            num_return_sequences=beam_width,
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            eos_token_id=eos,
            pad_token_id=1,
            return_dict_in_generate=True,
            output_scores=True,
        )
    outputs = [cut_padding(one[len(prompt) :], eos or []) for one in found.sequences.tolist()]
    return list(zip(outputs, found.sequences_scores.tolist(), strict=True))


def checkpoint_eos(checkpoint: Checkpoint) -> tuple[int, ...]:
    eos = checkpoint.reference.config.eos_token_id
    return (eos,) if isinstance(eos, int) else tuple(eos)


def cut_padding(output: list[int], eos: list[int]) -> list[int]:
    end = next((place for place, token_id in enumerate(output) if token_id in eos), len(output))
    return output[: end + 1]


def make_llm(checkpoint: Checkpoint, engine: str) -> LLM:
    return LLM(
        str(checkpoint.folder),
        skip_tokenizer_init=True,
        distributed_executor_backend="uni",
        max_model_len=64,
        block_size=8,
        dtype="float32",
        **ENGINES[engine],
    )


def search(llm: LLM, prompts: list[list[int]], **fields: Any) -> list[BeamSearchOutput]:
    params = BeamSearchParams(max_tokens=MAX_TOKENS, include_stop_str_in_output=True, **fields)
    return llm.beam_search([{"prompt_token_ids": prompt} for prompt in prompts], params)


@pytest.mark.parametrize("engine", ENGINES)
def test_sequences_and_scores_equal_transformers(
    checkpoint: Checkpoint, engine: str, expected: dict[str, list[list[tuple[list[int], float]]]]
):
    with make_llm(checkpoint, engine) as llm:
        check_searches(llm, make_prompts(checkpoint), expected)
        llm.llm_engine.check_integrity()
        if engine == "a pool that loses beams' blocks":
            assert llm.stats().prefix_misses_evicted_total > 0


def check_searches(
    llm: LLM, prompts: list[list[int]], expected: dict[str, list[list[tuple[list[int], float]]]]
) -> None:
    for name, fields in SEARCHES.items():
        for prompt, output, reference in zip(
            prompts, search(llm, prompts, **fields), expected[name], strict=True
        ):
            assert len(output.sequences) == fields["beam_width"]
            for one, (tokens, score) in zip(output.sequences, reference, strict=bool(reference)):
                assert one.tokens == prompt + tokens, name
                assert one.score == pytest.approx(score, rel=2e-6, abs=2e-6), name
                assert len(one.logprobs) == len(tokens)
                assert one.cum_logprob == pytest.approx(sum_logprobs(one.logprobs), rel=1e-5)


def sum_logprobs(logprobs: Any) -> float:
    return sum(next(iter(entry.values())).logprob for entry in logprobs)


def test_parameters_that_cannot_be_used_are_named(checkpoint: Checkpoint):
    cases: list[tuple[dict[str, Any], str]] = [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 2.5}, "beam_width"),
        ({"beam_width": 99}, "beam_width"),
        ({"beam_width": 2, "max_tokens": 0}, "max_tokens"),
        ({"beam_width": 2, "length_penalty": float("nan")}, "length_penalty"),
        ({"beam_width": 2, "early_stopping": "sometimes"}, "early_stopping"),
        ({"beam_width": 2, "ignore_eos": 1}, "ignore_eos"),
    ]
    with make_llm(checkpoint, "plain") as llm:
        for fields, named in cases:
            with pytest.raises(SamplingParamsError, match=named):
                llm.beam_search([[5, 6]], BeamSearchParams(**({"max_tokens": 4} | fields)))
