"""StepCosts: how long a step takes, by how many tokens are in it. Measured, and kept here with its date.

`python -m quire.tools.sim.fleet.measure MODEL` prints an entry: the best of some rounds, for other load only
adds. Up to MAX_DECODED tokens so many requests decode, above it is a prompt of that length.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class StepCosts:
    """`seconds[i]` is what a step of `tokens[i]` takes; both rise."""

    measured: str  # when
    ready_s: float  # from a core's start until it is ready
    tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    def find(self, num_tokens: int) -> float:
        """Seconds of a step, between measured ones on a line; beyond the last as its tokens cost."""
        place = bisect_left(self.tokens, num_tokens)
        if place == 0:
            return self.seconds[0]
        place = min(place, len(self.tokens) - 1)
        low, high = self.tokens[place - 1], self.tokens[place]
        slope = (self.seconds[place] - self.seconds[place - 1]) / (high - low)
        return self.seconds[place - 1] + slope * (num_tokens - low)

    def scale(self, factor: float) -> StepCosts:
        """Of a model whose steps take `factor` times as long."""
        return replace(self, seconds=tuple(seconds * factor for seconds in self.seconds))


MAX_DECODED = 64
MEASURED_TOKENS = (1, 4, 16, 64, 256, 1024, 2000)

# On 2 cores of an Intel Xeon with AMX, bfloat16, the best of 9 rounds beside other load.
STEP_COSTS = {
    "tiny": StepCosts(
        measured="2026-11-22",
        ready_s=1.3,
        tokens=(1, 4, 16, 64, 256, 1024, 2000),
        seconds=(0.000289, 0.000289, 0.000366, 0.00105, 0.00256, 0.00772, 0.0196),
    ),
}
