"""Attacks: one way each to hurt a server by size, count or slip, and the answers that it may get."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from typing import NamedTuple

from .plan import Target

# What an attacker may be told instead of what it asked for. A 5xx other than "no room now" is a defect.
REFUSALS = frozenset({"400", "408", "413", "429", "431", "503"})
UNANSWERED = frozenset({"cut", "open", "not accepted"})  # as `wire` names them

# Plays once, until its turn is over (time.monotonic) at the latest; what it opens it closes. Returns how it
# was answered.
Play = Callable[[float], Counter[str]]


class Attack(NamedTuple):
    """allowed: the answers that break nothing. prepare: before the first turn, outside everybody's time."""

    allowed: Collection[str]
    prepare: Callable[[Target, random.Random], Play]


ATTACKS: dict[str, Attack] = {}


def attack(
    name: str, allowed: Collection[str]
) -> Callable[[Callable[[Target, random.Random, float], Counter[str]]], None]:
    """Make an attack of a function that plays it, and needs nothing before."""

    def register(play: Callable[[Target, random.Random, float], Counter[str]]) -> None:
        ATTACKS[name] = Attack(allowed, lambda target, rng: partial(play, target, rng))

    return register


def sleep_until(until: float) -> None:
    """By time.monotonic."""
    time.sleep(max(0.0, until - time.monotonic()))
