"""Are ranks right on GPUs? A model that two of them share, beside one that has all of it; one that dies.

Kernels are exact: what a step holds beside a request changes nothing.
"""

from __future__ import annotations

import os
import signal
import time

import torch

from .correctness import encode_prompts, generate, make_greedy, make_llm
from .rows import Row, Say, count_equal

_NUM_RANKS = 2
_NUM_TOKENS = 48


def check_ranks(say: Say, device: str = "cuda") -> None:
    """The packaged model's greedy tokens of one GPU and of two, again after a rank was killed."""
    num_gpus = torch.cuda.device_count()
    if num_gpus < _NUM_RANKS:
        say(Row("ranks", f"skipped: {num_gpus} GPU here, {_NUM_RANKS} are needed"))
        return
    prompts, params = encode_prompts(), make_greedy(_NUM_TOKENS)
    for dtype in ("float32", "bfloat16"):
        with make_llm(dtype, device, exact=True) as llm:
            alone = generate(llm, prompts, params)
        with make_llm(dtype, device, exact=True, tensor_parallel_size=_NUM_RANKS) as llm:
            started = time.perf_counter()
            shared = generate(llm, prompts, params)
            step_ms = (time.perf_counter() - started) / _NUM_TOKENS * 1e3
            again = generate(llm, prompts, params)
            os.kill(llm.llm_engine.facts.pids["worker-1"], signal.SIGKILL)
            recovered = generate(llm, prompts, params)
        say(count_equal(f"{dtype}, {_NUM_RANKS} ranks and one", shared, alone, is_judged=dtype == "float32"))
        say(count_equal(f"{dtype}, {_NUM_RANKS} ranks once more", again, shared))
        say(count_equal(f"{dtype}, after a rank was killed", recovered, shared))
        say(Row(f"{dtype}, a step of {_NUM_RANKS} ranks", f"{step_ms:.2f} ms"))
