"""What a KV cache of 8 bits costs: `python -m quire.tools.quantize.kv_cache_loss [MODEL] [--text FILE]`.

Likelihoods of held-out sequences, and greedy continuations of their beginnings, beside those with the model's
own type. All keys of a position are read as they were written, so 8 bits are in each but the first of them.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...frontend.llm import LLM
from ...frontend.models.model_folder import pocket_folder
from ...frontend.text.tokenizer import load_tokenizer
from ...ipc.params.sampling_params import SamplingParams
from ...ipc.spec.model_spec import KVCacheDtype
from .loss import score_sequences
from .texts import draw_sequences

_KV_DTYPES: tuple[KVCacheDtype, ...] = ("auto", "int8", "fp8")
_LENGTH = 512  # tokens of a sequence; a quarter of them are continued, for as many
_FIGURES = (
    "kv_cache_dtype | perplexity | mean change of a logprob | likeliest token same | greedy answers same"
)


class Scores(NamedTuple):
    """Of each position but the first, in the order of the sequences; and the answers' tokens."""

    logprobs: list[float]
    likeliest: list[int]
    answers: list[list[int]]


def score(model: str, kv_cache_dtype: KVCacheDtype, dtype: str, sequences: Sequence[Sequence[int]]) -> Scores:
    """By an engine of its own."""
    sizes: dict[str, Any] = {"max_model_len": _LENGTH + 1, "skip_tokenizer_init": True, "dtype": dtype}
    with LLM(model, kv_cache_dtype=kv_cache_dtype, **sizes) as llm:
        logprobs, likeliest = score_sequences(llm, sequences)
        count = _LENGTH // 4
        starts = [{"prompt_token_ids": list(ids[:count])} for ids in sequences]
        greedy = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        outputs = llm.generate(starts, greedy, use_tqdm=False)
    return Scores(logprobs, likeliest, [list(output.outputs[0].token_ids) for output in outputs])


def compare(plain: Scores, narrow: Scores) -> str:
    """A row of the table, with figures as `_FIGURES` names them."""
    count = len(plain.logprobs)
    change = sum(abs(a - b) for a, b in zip(plain.logprobs, narrow.logprobs, strict=True)) / count
    same = sum(map(int.__eq__, plain.likeliest, narrow.likeliest)) / count
    answers = sum(a == b for a, b in zip(plain.answers, narrow.answers, strict=True))
    perplexity = math.exp(-sum(narrow.logprobs) / count)
    return f"{perplexity:.4f} | {change:.4f} | {100 * same:.2f} % | {answers} of {len(plain.answers)}"


def main() -> None:
    """Print a row for each type."""
    parser = argparse.ArgumentParser(prog="python -m quire.tools.quantize.kv_cache_loss", description=__doc__)
    parser.add_argument("model", nargs="?", default=str(pocket_folder()), help="a model folder")
    parser.add_argument("--text", type=Path, help="a text file (the pocket model's corpus)")
    parser.add_argument("--dtype", default="bfloat16", help="of the model (bfloat16)")
    options = parser.parse_args()
    _, sequences = draw_sequences(load_tokenizer(options.model), options.text, 0, _LENGTH)
    scores = {name: score(options.model, name, options.dtype, sequences) for name in _KV_DTYPES}
    print(f"| {_FIGURES} |\n|{'---|' * 5}")
    for name in _KV_DTYPES:
        print(f"| {name} | {compare(scores['auto'], scores[name])} |")


if __name__ == "__main__":
    main()
