"""`quire stress --long-prompt N`: 16 streams, beside which a prompt of N tokens comes in, under each policy.

Nothing dies. It shows how long streams wait between two tokens before and meanwhile, and how long the prompt
takes beside them and alone; in the last row chunks go by tokens, without a bound for the gap.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, get_args

from ...frontend.async_llm import AsyncLLM
from ...frontend.options.engine_args import EngineArgs
from ...ipc.errors import InputError
from ...ipc.params.sampling_params import RequestOutputKind, SamplingParams
from ...ipc.spec.config import SchedulingPolicy
from ..bench.bench_model import load_bench_model
from ..bench.machine import print_machine
from ..bench.table import format_table
from .measures import Times, measure_waits
from .report import BROKEN_EXIT_CODE

NUM_STREAMS = 16
MIN_ALLOWED_S = 0.1  # for the p99 gap, or
MAX_STRETCH = 2.0  # times the undisturbed one, where that is more
_STREAM_PROMPT = 32
_NUM_CALM = 40  # tokens of each stream before the prompt comes
_FIRST_CALM = 8  # of which these warm up
_TIMEOUT_S = 1200.0
_VOCABULARY = 200  # of which prompts are


@dataclass(frozen=True, slots=True)
class Row:
    """What was seen under one policy."""

    name: str
    before: Times
    during: Times
    alone_s: float
    beside_s: float

    @property
    def is_within(self) -> bool:
        """Whether streams wait no longer than they may."""
        return self.during.p99_s <= max(MIN_ALLOWED_S, MAX_STRETCH * self.before.p99_s)


def run_long_prompt(num_tokens: int, engine: dict[str, Any]) -> int:
    """Run, print; 0 when streams waited no longer than they may. `engine`: arguments by EngineArgs' names."""
    model = load_bench_model(engine["model"])
    longest = model.spec.max_position_embeddings - 1
    if num_tokens > longest:
        raise InputError("long_prompt", num_tokens, f"at most {longest} tokens with model={model.name}")
    print_machine()
    values: dict[str, Any] = {**engine, "model": str(model.path), "dtype": model.dtype}
    rows: list[Row] = []
    policies: tuple[SchedulingPolicy, ...] = get_args(SchedulingPolicy)
    for policy, max_gap_ms in [*((one, None) for one in policies), (policies[0], 0)]:
        args = EngineArgs(**values, scheduling_policy=policy, max_gap_ms=max_gap_ms)
        name = policy if max_gap_ms is None else f"{policy} max_gap_ms={max_gap_ms}"
        rows.append(asyncio.run(_measure(name, args, num_tokens)))
    print(format_rows(rows))
    return 0 if all(row.is_within for row in rows[:-1]) else BROKEN_EXIT_CODE


def format_rows(rows: Sequence[Row]) -> str:
    """The table."""
    header = ["gaps, ms", "before p50", "p99", "max", "during p50", "p99", "max", "p99"]
    header += ["prompt alone s", "beside"]
    cells = [
        [
            *(row.name, *row.before.list_ms(), *row.during.list_ms()),
            *("holds" if row.is_within else "BROKEN", f"{row.alone_s:.2f}", f"{row.beside_s:.2f}"),
        ]
        for row in rows
    ]
    return format_table(header, cells)


async def _measure(name: str, args: EngineArgs, num_tokens: int) -> Row:
    rng = random.Random(0)

    def draw(count: int) -> list[int]:
        return [rng.randrange(1, _VOCABULARY) for _ in range(count)]

    async with AsyncLLM(args) as llm, asyncio.timeout(_TIMEOUT_S):
        await _answer(llm, draw(_STREAM_PROMPT), 2, [])
        alone_s = await _time_prompt(llm, draw(num_tokens))
        times: list[list[float]] = [[] for _ in range(NUM_STREAMS)]
        streams = [asyncio.create_task(_answer(llm, draw(_STREAM_PROMPT), None, one)) for one in times]
        while min(map(len, times)) < _NUM_CALM:
            if any(stream.done() for stream in streams):
                await asyncio.gather(*streams)
                raise InputError("long_prompt", num_tokens, "streams that last: the model's are too short")
            await asyncio.sleep(0.01)
        began = time.monotonic()
        beside_s = await _time_prompt(llm, draw(num_tokens))
        ended = began + beside_s
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    waits = [wait for one in times for wait in pairwise(one[_FIRST_CALM:])]
    before = measure_waits(wait for wait in waits if wait[1] <= began)
    during = measure_waits(wait for wait in waits if wait[1] > began and wait[0] < ended)
    assert before is not None
    if during is None:  # the streams had ended before the prompt came
        raise InputError("long_prompt", num_tokens, "a prompt that lasts longer than a step")
    return Row(name, before, during, alone_s, beside_s)


async def _time_prompt(llm: AsyncLLM, prompt: list[int]) -> float:
    began = time.monotonic()
    await _answer(llm, prompt, 1, [])
    return time.monotonic() - began


async def _answer(llm: AsyncLLM, prompt: list[int], max_tokens: int | None, times: list[float]) -> None:
    """`times` gets the moment of each piece."""
    params = SamplingParams(
        max_tokens=max_tokens, temperature=0.0, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    async for _ in llm.generate({"prompt_token_ids": prompt}, params):
        times.append(time.monotonic())
