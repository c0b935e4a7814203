"""What goes wrong on a GPU, brought about: a worker or a rank killed, too little memory, an illegal access.

Every request has to be answered, and the engine to go on with as many blocks as before.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any, Self

import torch
from torch import Tensor

from ...worker.sampling.logits_processor import LogitsProcessor, LogitsRequest
from .correctness import encode_prompts, generate, make_greedy, make_llm
from .rows import Row, Say, count_equal

_NUM_REQUESTS = 24
_NUM_TOKENS = 64
_NUM_RANKS, _RANK_TOKENS = 2, 48
_LEFT_BYTES = 24 << 20  # of the card's memory, beside the engine
_STRAY = "stray"
_FAR = 1 << 40


class StrayAccess(LogitsProcessor):
    """extra_args {"stray": n}: the n-th token's kernel reads where nothing is; a CPU is told the same."""

    def __init__(self, place: int) -> None:
        self._left = place

    @classmethod
    def for_request(cls, request: LogitsRequest) -> Self | None:
        place = request.extra_args.get(_STRAY)
        return None if place is None or request.output_token_ids else cls(place)

    def append(self, token_id: int) -> None:
        del token_id
        self._left -= 1

    def apply(self, logits: Tensor) -> None:
        if self._left:
            return
        if logits.device.type == "cpu":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        from ...kernels.program.gather_rows_triton import launch_gather_rows

        launch_gather_rows(logits[None], torch.full((1,), _FAR, device=logits.device))
        torch.cuda.synchronize()


def check_faults(say: Say, device: str = "cuda") -> None:
    """A killed worker, memory that runs out, an access of foreign memory: each in an engine under load."""
    for check in (_check_kill, _check_out_of_memory, _check_stray_access):
        check(say, device)


def _check_kill(say: Say, device: str) -> None:
    """The block count follows from the card's memory, which a killed process gives back late."""
    more: dict[str, Any] = {} if device == "cpu" else {"kv_cache_memory_bytes": None}
    with _make_llm(device, **more) as llm:
        wanted = generate(llm, _make_prompts(), make_greedy(_NUM_TOKENS))
        num_blocks = llm.stats().kv_blocks_total
        _enqueue(llm)
        os.kill(llm.llm_engine.facts.pids["worker"], signal.SIGKILL)
        found = [list(output.outputs[0].token_ids) for output in llm.wait_for_completion(use_tqdm=False)]
        after = llm.stats().kv_blocks_total
    say(count_equal("killed under load", found, wanted))
    say(Row("killed under load, blocks", f"{after:,}", f"{num_blocks:,}", after == num_blocks))


def _check_out_of_memory(say: Say, device: str) -> None:
    """Another process' memory, in fact this one's, grows until a step finds none."""
    hooks = {"fault_hooks": "worker.execute:oom@20"}
    with _make_llm(device, **hooks) as llm:
        _say_answers(say, "out of memory, feigned", llm, _NUM_REQUESTS)
    if device == "cpu":
        return
    with _make_llm(device) as llm:
        free = torch.cuda.mem_get_info()[0]
        ballast = torch.empty(max(0, free - _LEFT_BYTES), dtype=torch.uint8, device=device)
        _say_answers(say, "out of memory, the card full", llm, _NUM_REQUESTS)
        del ballast
        torch.cuda.empty_cache()
        _say_answers(say, "out of memory, over", llm, _NUM_REQUESTS)


def _check_stray_access(say: Say, device: str) -> None:
    """The worker's context is lost with it; who asked for it may be failed, nobody else. A CPU's goes on."""
    name = f"{__name__}:{StrayAccess.__name__}"
    with _make_llm(device, logits_processors=[name]) as llm:
        before = llm.llm_engine.facts.pids["worker"]
        _say_answers(say, "illegal access of one request", llm, _NUM_REQUESTS - 1, {_STRAY: 5})
        _say_answers(say, "illegal access, over", llm, _NUM_REQUESTS)
        is_gone = not _is_alive(before)
    if device != "cpu":
        say(Row("illegal access, the worker", "another" if is_gone else "the same", "another", is_gone))


def _say_answers(say: Say, name: str, llm: Any, least: int, extra: dict[str, Any] | None = None) -> None:
    # `extra` is of one in the middle.
    extras = [extra if number == _NUM_REQUESTS // 2 else None for number in range(_NUM_REQUESTS)]
    params = [make_greedy(_NUM_TOKENS, extra_args=each) for each in extras]
    outputs = llm.generate(_as_inputs(), params, use_tqdm=False)
    num_whole = sum(len(output.outputs[0].token_ids) == _NUM_TOKENS for output in outputs)
    reasons = sorted({str(output.outputs[0].finish_reason) for output in outputs})
    detail = f"{num_whole} of {len(outputs)} whole; ended by {', '.join(reasons)}"
    say(Row(name, detail, f"at least {least}", num_whole >= least))


def _make_llm(device: str, **engine_args: Any) -> Any:
    return make_llm("float32", device, exact=True, **({"log_level": "ERROR"} | engine_args))


def _make_prompts() -> list[list[int]]:
    prompts = encode_prompts()
    return [[*prompts[i % len(prompts)], 5 + i] for i in range(_NUM_REQUESTS)]


def _as_inputs() -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": ids} for ids in _make_prompts()]


def _enqueue(llm: Any) -> None:
    """Requests that are running when this returns, none of them done."""
    llm.enqueue(_as_inputs(), make_greedy(_NUM_TOKENS))
    while llm.stats().num_running < _NUM_REQUESTS // 2:
        pass


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def check_ranks(say: Say, device: str = "cuda") -> None:
    """The packaged model's greedy tokens of one GPU and of two, again after a rank was killed.

    Kernels are exact: what a step holds beside a request changes nothing.
    """
    num_gpus = torch.cuda.device_count()
    if num_gpus < _NUM_RANKS:
        say(Row("ranks", f"skipped: {num_gpus} GPU here, {_NUM_RANKS} are needed"))
        return
    prompts, params = encode_prompts(), make_greedy(_RANK_TOKENS)
    for dtype in ("float32", "bfloat16"):
        with make_llm(dtype, device, exact=True) as llm:
            alone = generate(llm, prompts, params)
        with make_llm(dtype, device, exact=True, tensor_parallel_size=_NUM_RANKS) as llm:
            started = time.perf_counter()
            shared = generate(llm, prompts, params)
            step_ms = (time.perf_counter() - started) / _RANK_TOKENS * 1e3
            again = generate(llm, prompts, params)
            os.kill(llm.llm_engine.facts.pids["worker-1"], signal.SIGKILL)
            recovered = generate(llm, prompts, params)
        say(count_equal(f"{dtype}, {_NUM_RANKS} ranks and one", shared, alone, is_judged=dtype == "float32"))
        say(count_equal(f"{dtype}, {_NUM_RANKS} ranks once more", again, shared))
        say(count_equal(f"{dtype}, after a rank was killed", recovered, shared))
        say(Row(f"{dtype}, a step of {_NUM_RANKS} ranks", f"{step_ms:.2f} ms"))
