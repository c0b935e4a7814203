"""Attack: one way to hurt a server by size, count or slip, and the answers that it may get."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter

from .plan import Target

# What an attacker may be told instead of what it asked for. A 5xx other than "no room now" is a defect.
REFUSALS = frozenset({"400", "408", "413", "429", "431", "503"})


class Attack(ABC):
    """Played again and again until its turn is over; what it opens it closes.

    `allowed`: the answers that break nothing. One that is cut off without an answer says so where it may be.
    """

    allowed: frozenset[str]

    def __init__(self, target: Target, rng: random.Random) -> None:
        self.target = target
        self.rng = rng

    def prepare(self) -> None:  # noqa: B027 (most have nothing to make)
        """Before the first turn, outside everybody's time: what takes long to make."""

    @abstractmethod
    def play(self, until: float) -> Counter[str]:
        """Once, by `until` (time.monotonic) at the latest; returns how it was answered."""
