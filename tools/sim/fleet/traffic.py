"""The requests of a fleet's run: conversations that share beginnings, or prompts that share nothing."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ..fake_worker import VOCAB_SIZE

Traffic = Literal["prefix", "random"]

PREFIX_TOKENS = 512
PREFIXES_PER_ENGINE = 16
CONVERSATIONS_PER_ENGINE = 64
_MAX_TURNS = 4
_TURN_TOKENS = (16, 64)  # that a user adds
_OUTPUT_TOKENS = (16, 64)
_RANDOM_PROMPT_TOKENS = (64, 512)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that comes `at` seconds after the beginning."""

    at: float
    prompt: list[int]
    max_tokens: int


def draw_arrivals(
    traffic: Traffic, num_engines: int, rate: float, duration_s: float, rng: random.Random
) -> Iterator[Arrival]:
    """Poisson arrivals, `rate` a second over all engines."""
    draw = _draw_conversations(num_engines, rng) if traffic == "prefix" else _draw_random(rng)
    at = rng.expovariate(rate)
    while at < duration_s:
        yield Arrival(at, next(draw), rng.randint(*_OUTPUT_TOKENS))
        at += rng.expovariate(rate)


def _draw_conversations(num_engines: int, rng: random.Random) -> Iterator[list[int]]:
    """A turn of one of the conversations; one that has had its turns begins again with its prefix."""
    prefixes = [_draw_tokens(PREFIX_TOKENS, rng) for _ in range(PREFIXES_PER_ENGINE * num_engines)]
    count = CONVERSATIONS_PER_ENGINE * num_engines
    turns: list[list[int]] = [[] for _ in range(count)]
    lengths = [0] * count
    while True:
        which = rng.randrange(count)
        if lengths[which] == 0:
            turns[which] = prefixes[which % len(prefixes)]
        turns[which] = turns[which] + _draw_tokens(rng.randint(*_TURN_TOKENS), rng)
        lengths[which] = (lengths[which] + 1) % _MAX_TURNS
        yield turns[which]


def _draw_random(rng: random.Random) -> Iterator[list[int]]:
    while True:
        yield _draw_tokens(rng.randint(*_RANDOM_PROMPT_TOKENS), rng)


def _draw_tokens(count: int, rng: random.Random) -> list[int]:
    return [number % VOCAB_SIZE for number in array("H", rng.randbytes(2 * count))]
