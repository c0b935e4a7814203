"""StepCosts: how long a step takes, by how many tokens are in it. Measured, and kept here with its date; on
GPUs by the cost model.

`python -m quire.tools.sim.fleet.measure MODEL` prints an entry: the best of some rounds, for other load only
adds. Up to MAX_DECODED tokens so many requests decode, above it is a prompt of that length.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from itertools import accumulate

from ....frontend.models.families import read_model_spec
from ...bench.cost_model import CARDS, StepShape, compute_step_work
from ...bench.model_configs import DUMMY_MODELS


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
_CONTEXT, _GPU_READY_S = 512, 15.0  # of estimated steps; a GPU's start with a warm cache
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


def find_costs(name: str) -> StepCosts:
    """Measured ones, or those of "MODEL@CARD" by the cost model (`quire bench roofline`).

    Raises ValueError that says what there is.
    """
    if name in STEP_COSTS:
        return STEP_COSTS[name]
    model, _, card = name.partition("@")
    if card not in CARDS or model not in DUMMY_MODELS:
        cards, models = ", ".join(CARDS), ", ".join(DUMMY_MODELS)
        raise ValueError(
            f"{', '.join(STEP_COSTS)}, or MODEL@CARD with a model of {models} and a card of {cards}"
        )
    spec = read_model_spec(DUMMY_MODELS[model])
    shapes = [
        StepShape(tokens, _CONTEXT) if tokens <= MAX_DECODED else StepShape(0, _CONTEXT, tokens)
        for tokens in MEASURED_TOKENS
    ]
    works = [compute_step_work(spec, "bfloat16", shape) for shape in shapes]
    seconds = accumulate((work.estimate_s(CARDS[card]) for work in works), max)
    return StepCosts("estimated", _GPU_READY_S, MEASURED_TOKENS, tuple(seconds))
