"""Steps of chosen shapes on a worker of this process, launched ahead as a worker process launches them.

No core stands behind it: rows get blocks of their own in turn, and every row's request is greedy.
"""

from __future__ import annotations

import time
from collections import deque
from random import Random
from typing import TYPE_CHECKING, Any

from ...ipc.params.sampling_params import SamplingParams
from ...ipc.protocol.step import GroupBlocks, NewRequestData, SchedulerOutput
from ...ipc.protocol.token_ids import encode_token_ids
from ...ipc.protocol.token_lists import TokenLists

if TYPE_CHECKING:
    from ...worker.steps.model_runner import LaunchedStep

_FIRST_PLAIN_TOKEN = 16


class StepDriver:
    """One worker, started with the first step's cost behind it. Engine arguments are EngineArgs'."""

    def __init__(self, **engine_args: Any) -> None:
        from ...frontend.options.engine_args import EngineArgs
        from ...worker.worker import Worker

        self._config = EngineArgs(log_level="WARNING", **engine_args).create_engine_config()
        self._worker = Worker(self._config, lambda _phase: None)
        ready = self._worker.start()
        self._num_blocks = ready.num_gpu_blocks
        self._windows = self._config.model.spec.kv_windows
        self.ledger_bytes = sum(size for _, size in ready.ledger)
        self._max_ahead = 1 if self._worker.is_async else 0
        self._next_block = self._next_step = 0
        self._taken: set[int] = set()
        self._in_flight: deque[LaunchedStep] = deque()

    def run(self, steps: list[SchedulerOutput]) -> float:
        """Seconds of these steps, with one launched before the one ahead of it is collected, if it can be."""
        start = time.perf_counter()
        for step in steps:
            self._in_flight.append(self._worker.launch(step))
            if len(self._in_flight) > self._max_ahead:
                self._worker.collect(self._in_flight.popleft())
        while self._in_flight:
            self._worker.collect(self._in_flight.popleft())
        return time.perf_counter() - start

    def enter(self, rows: list[int], num_tokens: int, room: int = 0) -> SchedulerOutput:
        """A prompt of so many tokens in each of these rows, which then have room for more."""
        return self._make(rows, [num_tokens] * len(rows), rows, [num_tokens] * len(rows), room)

    def decode(self, rows: list[int], enters: int | None = None, num_tokens: int = 0) -> SchedulerOutput:
        """A token of each of these rows; and a whole prompt in row `enters`."""
        if enters is None:
            return self._make(rows, [1] * len(rows), [], [], 0)
        return self._make([*rows, enters], [1] * len(rows) + [num_tokens], [enters], [num_tokens], 0)

    def reset(self) -> None:
        """Forget all rows."""
        self._worker.reset_rows()
        self._next_block = 0
        self._taken.clear()

    def _make(
        self, rows: list[int], counts: list[int], entering: list[int], lengths: list[int], room: int
    ) -> SchedulerOutput:
        self._next_step += 1
        requests = [self._make_request(*each, room) for each in zip(entering, lengths, strict=True)]
        freed = [row for row in entering if row in self._taken]
        self._taken.update(entering)
        return SchedulerOutput(self._next_step, rows, counts, requests, freed_rows=freed)

    def _make_request(self, row: int, num_tokens: int, room: int) -> NewRequestData:
        random = Random(f"{row} {self._next_step}")
        vocab = self._config.model.spec.vocab_size
        prompt = [random.randrange(_FIRST_PLAIN_TOKEN, vocab) for _ in range(num_tokens)]
        return NewRequestData(
            row=row,
            request_id=f"row {row}",
            prompt_token_ids=encode_token_ids(prompt),
            output_token_ids=b"",
            sampling_params=SamplingParams(temperature=0.0),
            eos_token_ids=[],
            token_lists=TokenLists(),
            blocks=[GroupBlocks(self._take_blocks(num_tokens + room + 1)) for _ in self._windows],
            num_computed_tokens=0,
        )

    def _take_blocks(self, num_tokens: int) -> list[int]:
        count = -(-num_tokens // self._config.cache.block_size)
        first, self._next_block = self._next_block, self._next_block + count
        return [block % self._num_blocks for block in range(first, first + count)]
