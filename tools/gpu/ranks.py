"""Are ranks right on GPUs? A model that two of them share, beside one that has all of it; one that dies.

Kernels are exact: what a step holds beside a request changes nothing.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch

from .correctness import encode_prompts
from .rows import Row, Say

_NUM_RANKS = 2
_NUM_TOKENS = 48


def check_ranks(say: Say, device: str = "cuda") -> None:
    """The packaged model's greedy tokens of one GPU and of two, again after a rank was killed."""
    num_gpus = torch.cuda.device_count()
    if num_gpus < _NUM_RANKS:
        say(Row("ranks", f"skipped: {num_gpus} GPU here, {_NUM_RANKS} are needed"))
        return
    for dtype in ("float32", "bfloat16"):
        with _make_llm(dtype, device) as llm:
            alone = _generate(llm)
        with _make_llm(dtype, device, tensor_parallel_size=_NUM_RANKS) as llm:
            started = time.perf_counter()
            shared = _generate(llm)
            step_ms = (time.perf_counter() - started) / _NUM_TOKENS * 1e3
            again = _generate(llm)
            os.kill(llm.llm_engine.facts.pids["worker-1"], signal.SIGKILL)
            recovered = _generate(llm)
        say(_compare(f"{dtype}, {_NUM_RANKS} ranks and one", shared, alone, is_judged=dtype == "float32"))
        say(_compare(f"{dtype}, {_NUM_RANKS} ranks once more", again, shared))
        say(_compare(f"{dtype}, after a rank was killed", recovered, shared))
        say(Row(f"{dtype}, a step of {_NUM_RANKS} ranks", f"{step_ms:.2f} ms"))


def _make_llm(dtype: str, device: str, **engine_args: Any) -> Any:
    from ...frontend.llm import LLM

    fields: dict[str, Any] = {
        "dtype": dtype,
        "device": device,
        "exact": True,
        "kv_cache_memory_bytes": "256MiB",
    }
    return LLM(log_level="WARNING", **(fields | engine_args))


def _generate(llm: Any) -> list[list[int]]:
    from ...ipc.params.sampling_params import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=_NUM_TOKENS, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in encode_prompts()], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def _compare(name: str, ours: list[list[int]], wanted: list[list[int]], *, is_judged: bool = True) -> Row:
    num_equal = sum(a == b for a, b in zip(ours, wanted, strict=True))
    is_ok = num_equal == len(wanted) if is_judged else None
    return Row(name, f"{num_equal} of {len(wanted)} runs equal", "all" if is_judged else "", is_ok)
