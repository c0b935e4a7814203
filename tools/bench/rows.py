"""`quire bench rows`: what each thing that a request may ask of its tokens costs a row, beside a plain one.

No model: random logits become tokens, logprobs and the worker's answer by the worker's own code, in rows of
512 prompt tokens. Processor time of one thread, so that neighbours on the machine change little.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...ipc.params.sampling_params import SamplingParams
from ...ipc.protocol.step import NewRequestData
from ...ipc.protocol.token_ids import encode_token_ids
from ...ipc.protocol.token_lists import pack_token_lists
from ..options import COUNT, option
from .machine import print_machine, write_json
from .table import format_table

if TYPE_CHECKING:
    from torch import Tensor

    from ...worker.steps.request_rows import RequestRows

_VOCAB_SIZES = (2048, 151_936)
_BATCH_SIZES = (1, 32)
_PROMPT_LEN = 512
_MAX_LEN = 4096
_WARM_UP = 5  # steps

_IDS = list(range(100, 120))
# What a request asks for; temperature 0 where it says nothing else. "words": bad words as ids.
_FEATURES: dict[str, dict[str, Any]] = {
    "plain (greedy)": {},
    "temperature": {"temperature": 1.0},
    "top_k 50": {"temperature": 1.0, "top_k": 50},
    "top_p 0.95": {"temperature": 1.0, "top_p": 0.95},
    "top_p 0.95, of sure logits": {"temperature": 0.25, "top_p": 0.95},
    "top_k 50, top_p 0.9": {"temperature": 1.0, "top_k": 50, "top_p": 0.9},
    "min_p 0.05": {"temperature": 1.0, "min_p": 0.05},
    "logprobs 0": {"logprobs": 0},
    "logprobs 20": {"logprobs": 20},
    "logprob_token_ids, 20": {"logprobs": 0, "logprob_token_ids": _IDS},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "frequency and presence_penalty": {"frequency_penalty": 0.5, "presence_penalty": 0.5},
    "logit_bias, 20": {"logit_bias": dict.fromkeys(_IDS, 1.5)},
    "bad_words, 20 of 2 tokens": {"words": [[token, token + 1] for token in _IDS]},
    "allowed_token_ids, 20": {"allowed_token_ids": _IDS},
    "min_tokens": {"min_tokens": 4000, "stop_token_ids": [7]},
    "logprobs 20, penalties": {"logprobs": 20, "repetition_penalty": 1.1, "presence_penalty": 0.5},
}


@dataclass(frozen=True, slots=True)
class Options:
    """A row's cost by what its request asks for, in two vocabularies, alone and in a batch."""

    steps: int = option(60, "to measure, of each (60)", COUNT, metavar="N")
    json: str | None = option(None, "write every figure to a file too", metavar="FILE")


def run(options: Options) -> int:
    """Measure and print; returns 0."""
    import torch

    from ...kernels.program.native import set_num_threads

    machine = print_machine()
    torch.set_num_threads(1)
    set_num_threads(1)
    shapes = [(size, num_rows) for size in _VOCAB_SIZES for num_rows in _BATCH_SIZES]
    figures: dict[str, list[float]] = {}
    with torch.inference_mode():
        for name, asks in _FEATURES.items():
            figures[name] = [measure_row_us(asks, *shape, options.steps) for shape in shapes]
    header = ["us a row", *(f"{size:,} tokens, {num_rows}" for size, num_rows in shapes)]
    print(format_table(header, [[name, *(f"{us:.1f}" for us in row)] for name, row in figures.items()]))
    print(f"medians of {options.steps} steps: from logits N(0, 3) to the packed answer, without the model")
    write_json(options.json, {"machine": machine, "shapes": shapes, "us": figures})
    return 0


def measure_row_us(asks: dict[str, Any], vocab_size: int, num_rows: int, num_steps: int) -> float:
    """Median microseconds of processor time that a row of a step takes."""
    import numpy as np
    import torch

    from ...worker.steps.request_rows import RequestRows

    rows = RequestRows(num_rows, _MAX_LEN, vocab_size)
    for row in range(num_rows):
        rows.enter(_make_request(row, dict(asks), vocab_size))
    row_ids = np.arange(num_rows, dtype=np.int64)
    logits = torch.randn((num_rows, vocab_size), generator=torch.Generator().manual_seed(0)) * 3
    step = _make_step(rows, row_ids)
    times: list[int] = []
    for _ in range(_WARM_UP + num_steps):
        edited = logits.clone()
        began = time.thread_time_ns()
        step(edited)
        times.append(time.thread_time_ns() - began)
    return statistics.median(times[_WARM_UP:]) / num_rows / 1e3


def _make_step(rows: RequestRows, row_ids: Any) -> Callable[[Tensor], object]:
    """Logits [S, V] to the answer of a step, as GPUModelRunner makes it."""
    from ...kernels.choice import native_library
    from ...kernels.sampling.argmax import launch_argmax
    from ...worker.sampling.logprobs import pack_positions
    from ...worker.sampling.sampler import SampledTokens, sample

    def step(logits: Tensor) -> object:
        if rows.is_greedy[row_ids].all():
            sampled = SampledTokens(*launch_argmax(native_library(), logits), [])
        else:
            sampled = sample(logits, rows.make_sampling_batch(row_ids))
        rows.append_sampled(row_ids, sampled.token_ids.numpy())
        blocks = [pack_positions(*(part.numpy() for part in tensors)) for _, tensors in sampled.logprobs]
        return sampled.token_ids.tolist(), blocks

    return step


def _make_request(row: int, asks: dict[str, Any], vocab_size: int) -> NewRequestData:
    words = asks.pop("words", [])
    params = SamplingParams(**{"temperature": 0.0, "seed": row, "max_tokens": _MAX_LEN} | asks)
    prompt = encode_token_ids((row + place * 3) % vocab_size for place in range(_PROMPT_LEN))
    lists = pack_token_lists(params, words, vocab_size)
    return NewRequestData(row, f"bench-{row}", prompt, b"", params, [2], lists, [], 0)
