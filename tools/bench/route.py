"""`quire bench route`: what choosing the engine finds in two engines' prefix caches, beside taking turns.

A daemon of two engines, and frontends that keep a number of requests running between them. Each round has
both ways to choose, one after the other, with empty caches and new frontends, so that a busy machine disturbs
both.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import statistics
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from unittest.mock import patch

from ...frontend.async_llm import AsyncLLM
from ...frontend.client.engine_router import EngineRouter
from ...ipc.params.sampling_params import SamplingParams
from .machine import describe_machine, format_machine
from .private_daemon import run_private_daemon
from .table import format_table

BLOCK = 16
NUM_ENGINES, NUM_PREFIXES, NUM_CONVERSATIONS = 2, 16, 64
_PREFIX_TOKENS, _OWN_TOKENS, _TURN_TOKENS = 512, 24, 8
_RANDOM_TOKENS = (20, 600)
_OUTPUT_TOKENS = 8
# Room in each engine for half of the prefixes, and for what is a request's own.
NUM_BLOCKS = NUM_PREFIXES // 2 * _PREFIX_TOKENS // BLOCK
_OWN_BLOCKS = 5
_NAME = "bench-route"


@dataclass(frozen=True, slots=True)
class RouteOptions:
    """What is measured; `at_once` requests of all frontends together."""

    rounds: int
    turns: int
    at_once: int
    frontends: int
    model: str


@dataclass(slots=True)
class Found:
    """Of one kind of traffic and way to choose, a figure a round."""

    cached: list[float] = field(default_factory=list[float])  # of the prompts' tokens
    seconds: list[float] = field(default_factory=list[float])


def run_route(options: RouteOptions) -> int:
    """Measure and print; returns 0."""
    print(format_machine(describe_machine()) + "\n")
    found = {(traffic, way): Found() for traffic in ("prefix", "random") for way in ("turns", "router")}
    blocks = NUM_BLOCKS + _OWN_BLOCKS * options.at_once // NUM_ENGINES
    args = {"data_parallel_size": NUM_ENGINES, "num_gpu_blocks_override": blocks, "max_model_len": 1024}
    with run_private_daemon(_NAME, options.model, block_size=BLOCK, **args):
        for number in range(options.rounds):
            for (traffic, way), one in found.items():
                prompts = list(draw_prompts(traffic, options.turns, random.Random(number)))
                with _choosing_by_turns() if way == "turns" else contextlib.nullcontext():
                    cached, seconds = asyncio.run(_ask_all(prompts, options))
                one.cached.append(cached / sum(map(len, prompts)))
                one.seconds.append(seconds)
    rows = [
        [traffic, way, f"{statistics.median(one.cached):.1%}", f"{statistics.median(one.seconds):.2f}"]
        for (traffic, way), one in found.items()
    ]
    print(format_table(["traffic", "engine by", "cached", "seconds"], rows))
    _print_ratios(found)
    print(
        f"medians of {options.rounds} rounds: {NUM_CONVERSATIONS} conversations of {options.turns} turns "
        f"over {NUM_PREFIXES} prefixes of {_PREFIX_TOKENS} tokens, {NUM_ENGINES} engines with {blocks} "
        "blocks each; "
        f"{options.at_once} requests at a time from {options.frontends} frontends; "
        f"load after: {os.getloadavg()[0]:.2f}"
    )
    return 0


def draw_prompts(traffic: str, num_turns: int, rng: random.Random) -> Iterator[list[int]]:
    """Conversations in another order each turn, or as many prompts that share nothing."""
    if traffic == "random":
        for _ in range(num_turns * NUM_CONVERSATIONS):
            yield _draw(rng.randint(*_RANDOM_TOKENS), rng)
        return
    prefixes = [_draw(_PREFIX_TOKENS, rng) for _ in range(NUM_PREFIXES)]
    talks = [prefixes[number % NUM_PREFIXES] + _draw(_OWN_TOKENS, rng) for number in range(NUM_CONVERSATIONS)]
    for _ in range(num_turns):
        for number in rng.sample(range(NUM_CONVERSATIONS), NUM_CONVERSATIONS):
            yield talks[number] + _draw(_TURN_TOKENS, rng)


def _draw(count: int, rng: random.Random) -> list[int]:
    return rng.choices(range(3, 1000), k=count)


@contextlib.contextmanager
def _choosing_by_turns() -> Generator[None]:
    turns = itertools.cycle(range(NUM_ENGINES))
    with patch.object(EngineRouter, "choose", lambda *_: next(turns)):
        yield


async def _ask_all(prompts: list[list[int]], options: RouteOptions) -> tuple[int, float]:
    """Tokens of prompts that were cached, and seconds for all."""
    async with contextlib.AsyncExitStack() as stack:
        frontends = [
            await stack.enter_async_context(AsyncLLM(attach=_NAME)) for _ in range(options.frontends)
        ]
        await frontends[0].reset_prefix_cache()
        waiting = iter(prompts)
        params = SamplingParams(temperature=0.0, max_tokens=_OUTPUT_TOKENS, ignore_eos=True)

        async def ask(llm: AsyncLLM) -> int:
            cached = 0
            for prompt in waiting:
                outputs = [one async for one in llm.generate({"prompt_token_ids": prompt}, params)]
                cached += outputs[-1].num_cached_tokens or 0
            return cached

        began = time.monotonic()
        counts = await asyncio.gather(
            *(ask(frontends[number % len(frontends)]) for number in range(options.at_once))
        )
        return sum(counts), time.monotonic() - began


def _print_ratios(found: dict[tuple[str, str], Found]) -> None:
    pairs = zip(found["prefix", "router"].cached, found["prefix", "turns"].cached, strict=True)
    print(f"\ncached by the router, prefix traffic: {statistics.median(a / b for a, b in pairs):.2f}x")
    for traffic in ("prefix", "random"):
        pairs = zip(found[traffic, "router"].seconds, found[traffic, "turns"].seconds, strict=True)
        print(f"time by the router, {traffic} traffic: {statistics.median(a / b for a, b in pairs):.2f}x")
