"""What a worker computes before its first request, so that no request waits for what is done once.

On a CPU that is the first call of a few functions. Where kernels are compiled for their arguments it is a
step of every kind: of one row, of 16 and of another number (Triton compiles anew for an integer that is 1, or
a multiple of 16), with every way to sample, and the largest step there can be, which also shows whether the
memory that was planned for steps is enough. The blocks of its requests hold nothing yet and are shared. It
knows steps, no kernels.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import torch

from ...ipc.params.pooling_params import PoolingParams
from ...ipc.params.sampling_params import SamplingParams
from ...ipc.protocol.step import GroupBlocks, NewRequestData, SchedulerOutput
from ...ipc.protocol.token_ids import encode_token_ids
from ...ipc.protocol.token_lists import TokenLists
from ...ipc.spec.config import EngineConfig
from ...kernels.triton.triton_runtime import CompileWatch
from ..sampling.logit_edit import keep_only

_log = logging.getLogger(__name__)

# Enough to reach the code of prefill and decode; more tokens would only take time.
_FEW_TOKENS = 4
_NUM_ROWS = (1, 3, 16, 40)  # 17 to 64 rows have tiles of their own
_CHUNKS = (2, 16, 17)  # tokens of a prompt's part
_PROGRESS_INTERVAL_S = 2.0

Run = list[SchedulerOutput]  # steps between which rows are kept


class WarmUp:
    """The steps of one worker; `num_blocks` are those of its KV cache."""

    def __init__(self, config: EngineConfig, num_blocks: int) -> None:
        self._config, self._num_blocks = config, max(1, num_blocks)
        self._max_len, self._scheduler = config.model.max_model_len, config.scheduler
        self._has_states = config.model.spec.state_size > 0

    def make_brief_runs(self) -> list[Run]:
        """A prompt and a token after it; of a model that generates nothing, a vector."""
        params = SamplingParams(temperature=1.0, top_p=0.9, seed=0)
        return [self._make_run(1, _FEW_TOKENS, params)]

    def make_full_runs(self) -> list[Run]:
        """Steps of every kind."""
        if not self._config.model.spec.has_logits:
            return [self._make_run(rows, chunk, SamplingParams()) for rows in _NUM_ROWS for chunk in _CHUNKS]
        runs = [self._make_run(rows, 1, params) for params in self._make_kinds() for rows in _NUM_ROWS]
        greedy = SamplingParams(temperature=0.0)
        runs += [self._make_run(rows, chunk, greedy) for rows in _NUM_ROWS for chunk in _CHUNKS]
        runs += [self._make_mixed_run(rows, greedy) for rows in (2, self._scheduler.max_num_seqs)]
        largest = self._scheduler.max_num_batched_tokens
        runs.append(self._make_run(-(-largest // self._max_len), self._max_len, greedy))
        runs.append(self._make_run(self._scheduler.max_num_seqs, 1, greedy))
        return runs

    def _make_kinds(self) -> Iterator[SamplingParams]:
        """Every way to sample that has a kernel of its own."""
        yield SamplingParams(temperature=0.0)
        yield SamplingParams(temperature=1.0, seed=0)
        yield SamplingParams(temperature=1.0, seed=0, top_k=20, top_p=0.95)
        yield SamplingParams(temperature=0.0, repetition_penalty=1.1, presence_penalty=0.1)
        yield SamplingParams(temperature=1.0, seed=0, top_k=20, top_p=0.95, presence_penalty=0.1)
        if self._config.model.max_logprobs:
            yield SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1)

    def _make_run(self, num_rows: int, num_tokens: int, params: SamplingParams) -> Run:
        """A step with parts of `num_tokens` of the prompts of so many rows, and one with a token of each."""
        num_rows, num_tokens = self._bound(num_rows, num_tokens)
        requests = [self._make_request(row, num_tokens, params) for row in range(num_rows)]
        rows = list(range(num_rows))
        if requests[0].pooling_params is not None:
            return [
                SchedulerOutput(0, rows, [num_tokens] * num_rows, requests, sampled_rows=[], pooled_rows=rows)
            ]
        steps = [SchedulerOutput(0, rows, [num_tokens] * num_rows, requests)]
        if num_tokens < self._max_len:
            steps.append(SchedulerOutput(1, rows, [1] * num_rows))
        return steps

    def _make_mixed_run(self, num_rows: int, params: SamplingParams) -> Run:
        """A token of some rows beside a part of another one's prompt."""
        num_rows, num_tokens = self._bound(num_rows, 1)
        if num_rows < 2 or self._max_len < 2:
            return self._make_run(num_rows, num_tokens, params)
        enters = [self._make_request(row, 1, params) for row in range(num_rows - 1)]
        rows, last = list(range(num_rows - 1)), num_rows - 1
        room = self._scheduler.max_num_batched_tokens - len(rows)
        chunk = max(1, min(_CHUNKS[-1], self._max_len - 1, room))
        return [
            SchedulerOutput(0, rows, [1] * len(rows), enters),
            SchedulerOutput(
                1, [*rows, last], [1] * len(rows) + [chunk], [self._make_request(last, chunk, params)]
            ),
        ]

    def _bound(self, num_rows: int, num_tokens: int) -> tuple[int, int]:
        """What of it a step of this engine can hold."""
        budget = self._scheduler.max_num_batched_tokens
        num_tokens = max(1, min(num_tokens, self._max_len, budget))
        return max(1, min(num_rows, self._scheduler.max_num_seqs, budget // num_tokens)), num_tokens

    def _make_request(self, row: int, num_tokens: int, params: SamplingParams) -> NewRequestData:
        num_blocks = -(-min(num_tokens + 1, self._max_len) // self._config.cache.block_size)
        block_ids = [block % self._num_blocks for block in range(num_blocks)]
        request = NewRequestData(
            row=row,
            request_id=f"warm-up {row}",
            prompt_token_ids=encode_token_ids([0] * num_tokens),
            output_token_ids=b"",
            sampling_params=params,
            eos_token_ids=[],
            token_lists=TokenLists(),
            blocks=[GroupBlocks(block_ids)] * len(self._config.model.spec.kv_windows),
            num_computed_tokens=0,
            state_slot=row if self._has_states else None,
        )
        spec = self._config.model.spec
        if spec.has_logits:
            return request
        assert spec.pooling is not None
        return msgspec.structs.replace(request, pooling_params=PoolingParams(task=spec.pooling.tasks[0]))


def run_all(runs: list[Run], execute: Callable[[SchedulerOutput], object], reset: Callable[[], None]) -> None:
    """Execute them one after the other; what takes long says how far it is."""
    started = said_at = time.monotonic()
    for number, run in enumerate(runs):
        for step in run:
            execute(step)
        reset()
        if time.monotonic() >= said_at + _PROGRESS_INTERVAL_S:
            said_at = time.monotonic()
            _log.info("warm-up: %d of %d steps, %.0f s", number + 1, len(runs), said_at - started)


def compile_kernels(
    warm_up: WarmUp,
    config: EngineConfig,
    device: torch.device,
    execute: Callable[[SchedulerOutput], object],
    reset: Callable[[], None],
) -> CompileWatch:
    """Have every kernel compiled, or loaded from the cache on disk; who watches hears of any later one."""
    watch = CompileWatch()
    started = time.monotonic()
    run_all(warm_up.make_full_runs(), execute, reset)
    if config.model.spec.has_logits:
        _mask_tokens(config.model.spec.vocab_size, device)
    _log.info("%d kernels compiled or loaded in %.1f s", watch.count, time.monotonic() - started)
    return watch


def _mask_tokens(vocab_size: int, device: torch.device) -> None:
    """As a grammar does, without compiling one."""
    logits = torch.zeros((2, vocab_size), dtype=torch.float32, device=device)
    words = np.zeros((2, -(-vocab_size // 32)), dtype=np.int32)
    keep_only(logits, words, np.arange(2))
