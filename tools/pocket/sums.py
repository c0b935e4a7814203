"""Small sums: additions and subtractions below 100, and the pairs that no training text may show.

Held-out pairs are unordered and fixed for good, so figures stay comparable. A subtraction shows the sum that
it undoes (42 - 12 shows 12 + 30), so it is held out with that sum. One-digit tables are never held out.
"""

from dataclasses import dataclass
from random import Random

from .phrases import read_phrases

LIMIT = 100
HELD_OUT_SHARE = 0.1
_HOLD_OUT_SEED = 20240607

_SUMS = read_phrases("sums")
ADD_FORMS: list[list[str]] = _SUMS["add_forms"]


@dataclass(frozen=True, slots=True)
class Sum:
    """`a` plus `b`, or with `is_minus` `a` minus `b` (never below zero)."""

    a: int
    b: int
    is_minus: bool = False

    @property
    def result(self) -> int:
        """What it comes to."""
        return self.a - self.b if self.is_minus else self.a + self.b

    @property
    def is_held_out(self) -> bool:
        """Whether it is left out of the training text, a subtraction with the sum that undoes it."""
        first, second = (self.b, self.result) if self.is_minus else (self.a, self.b)
        return (min(first, second), max(first, second)) in HELD_OUT

    def fill(self, form: str) -> str:
        """A template with its numbers."""
        return form.format(a=self.a, b=self.b, c=self.result)

    def ask(self, rng: Random) -> tuple[str, str]:
        """A question and its answer."""
        question, reply = rng.choice(_SUMS["take_forms"] if self.is_minus else ADD_FORMS)
        return self.fill(question), self.fill(reply)


def _choose_held_out() -> frozenset[tuple[int, int]]:
    pairs = [(a, b) for b in range(10, LIMIT) for a in range(b + 1)]
    return frozenset(Random(_HOLD_OUT_SEED).sample(pairs, round(len(pairs) * HELD_OUT_SHARE)))


HELD_OUT = _choose_held_out()


def draw_sum(rng: Random, is_minus: bool = False) -> Sum:
    """A sum that is not held out; one-digit numbers come up more often than their share of pairs."""
    while True:
        a, b = (rng.randrange(10) if rng.random() < 0.3 else rng.randrange(LIMIT) for _ in range(2))
        drawn = Sum(max(a, b), min(a, b), is_minus=True) if is_minus else Sum(a, b)
        if not drawn.is_held_out:
            return drawn


def draw_sum_turn(rng: Random) -> tuple[str, str]:
    """A question and its answer, for a conversation."""
    if rng.random() < 0.04:
        return _decline(rng)
    return draw_sum(rng, is_minus=rng.random() < 0.2).ask(rng)


def draw_sum_line(rng: Random) -> str:
    """One to three bare sums ("12 plus 30 is 42."), for raw text."""
    drawn = [draw_sum(rng, is_minus=rng.random() < 0.2) for _ in range(rng.randint(1, 3))]
    return " ".join(
        each.fill(rng.choice(_SUMS["take_lines" if each.is_minus else "add_lines"])) for each in drawn
    )


def _decline(rng: Random) -> tuple[str, str]:
    """Sums that are outside the pocket world: large numbers, other operations, results below zero."""
    big, small = rng.randrange(100, 10000), rng.randrange(2, 1000)
    a, b = (big, small) if rng.random() < 0.5 else (small, big)
    if rng.random() < 0.45:
        return rng.choice(_SUMS["large_forms"]).format(a=a, b=b), _SUMS["large_answer"]
    a, b = rng.randrange(LIMIT), rng.randrange(2, LIMIT)
    if rng.random() < 0.6:
        return rng.choice(_SUMS["other_forms"]).format(a=a, b=b), _SUMS["other_answer"]
    question, answer = _SUMS["below_zero"]
    a, b = min(a, b), max(a, b) + 1
    return question.format(a=a, b=b), answer.format(a=a, b=b)
