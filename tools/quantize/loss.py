"""What quantizing has cost: the pocket model's evaluation, or likelihood of a text, before and after."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...frontend.llm import LLM
from ...frontend.models.model_folder import pocket_folder
from ...ipc.params.sampling_params import SamplingParams
from ..pocket.asking import Pocket
from ..pocket.evaluate import evaluate


def is_pocket(folder: Path) -> bool:
    """Whether a model speaks as the pocket model does, so that its evaluation applies."""
    files = [path / "tokenizer.json" for path in (folder, pocket_folder())]
    return all(file.is_file() for file in files) and files[0].read_bytes() == files[1].read_bytes()


def compare_pockets(plain: Path, narrow: Path) -> Iterator[str]:
    """A line for each figure of the quick evaluation, as soon as both have it."""
    pairs = zip(evaluate(Pocket(plain), is_quick=True), evaluate(Pocket(narrow), is_quick=True), strict=True)
    for before, after in pairs:
        right = [score.total - len(score.failures) for score in (before, after)]
        yield f"{before.name:<44} {right[0]:>5} -> {right[1]:>4} of {before.total}"


def compare_likelihoods(plain: Path, narrow: Path, sequences: Sequence[Sequence[int]]) -> str:
    """A line: perplexities, and how often the likeliest token is the same."""
    scores: list[tuple[float, list[int]]] = []
    for folder in (plain, narrow):
        with LLM(str(folder), skip_tokenizer_init=True) as llm:
            logprobs, likeliest = score_sequences(llm, sequences)
            scores.append((math.exp(-sum(logprobs) / len(logprobs)), likeliest))
    (before, first), (after, second) = scores
    same = sum(map(int.__eq__, first, second)) / len(first)
    change = 100 * (after / before - 1)
    return (
        f"perplexity {before:.3f} -> {after:.3f} ({change:+.1f} %), the likeliest token is the same at "
        f"{100 * same:.1f} % of {len(first)} positions"
    )


def score_sequences(llm: LLM, sequences: Sequence[Sequence[int]]) -> tuple[list[float], list[int]]:
    """(its logprob, the likeliest token there) of each token but the first of each, one list for all."""
    logprobs, likeliest = list[float](), list[int]()
    prompts = [{"prompt_token_ids": list(ids)} for ids in sequences]
    params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    for ids, output in zip(sequences, llm.generate(prompts, params, use_tqdm=False), strict=True):
        assert output.prompt_logprobs is not None
        for token, table in zip(ids[1:], list(output.prompt_logprobs)[1:], strict=True):
            assert table is not None
            logprobs.append(table[token].logprob)
            likeliest.append(max(table.items(), key=lambda item: item[1].logprob)[0])
    return logprobs, likeliest
