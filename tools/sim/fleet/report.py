"""`python -m quire.tools.sim --engines N`: plays a fleet, and prints what came of it."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from .fleet import Fleet
from .step_costs import StepCosts, find_costs
from .traffic import PREFIX_TOKENS, Traffic, draw_arrivals

_COLUMNS = (
    "engines",
    "traffic",
    "routing    ",
    "  tok/s",
    "of offered",
    "cached",
    "TTFT ms p50",
    "   p90",
    "   p99",
    "silence s",
    "moved",
    "wrong",
    "busy min",
    "mean",
    " max",
    "us to place",
    "to take a digest",
)
_MEAN_OUTPUT = 40
_MEAN_PROMPT: dict[Traffic, int] = {"prefix": PREFIX_TOKENS + 100, "random": 288}


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """See `python -m quire.tools.sim --help`."""

    num_engines: int
    traffic: Traffic
    has_router: bool
    load: float  # of what the engines could do without a cache
    num_requests: int  # an engine
    num_frontends: int
    num_losses: int
    num_drains: int
    model: str
    scale: float  # of its steps
    seed: int


def play_fleet(options: FleetOptions) -> list[str]:
    """Play, print a line, and return what is wrong."""
    costs = find_costs(options.model).scale(options.scale)
    rate = options.load * options.num_engines / _count_request_s(costs, options.traffic)
    duration_s = options.num_requests * options.num_engines / rate
    rng = random.Random(options.seed)
    arrivals = list(draw_arrivals(options.traffic, options.num_engines, rate, duration_s, rng))
    fleet = Fleet(options.num_engines, options.num_frontends, costs, has_router=options.has_router)
    began = time.perf_counter()
    fleet.play(arrivals, duration_s, options.num_losses, options.num_drains)
    print(_format(options, fleet, rate), flush=True)
    took_s = time.perf_counter() - began
    print(f"  {len(arrivals)} requests in {duration_s:.0f} simulated s, {took_s:.0f} s here", flush=True)
    return fleet.wrong


def _count_request_s(costs: StepCosts, traffic: Traffic) -> float:
    """Of an engine, for one of many requests without a cache: its prompt, and its part of 16 rows' steps."""
    return costs.find(1024) / 1024 * _MEAN_PROMPT[traffic] + _MEAN_OUTPUT * costs.find(16) / 16


def _format(options: FleetOptions, fleet: Fleet, rate: float) -> str:
    ended = [life for life in fleet.lives if life.ended_at is not None]
    span_s = max(life.ended_at or 0.0 for life in ended) - min(life.added_at for life in ended)
    offered = (
        sum(life.request.sampling_params.max_tokens or 0 for life in fleet.lives) / len(fleet.lives) * rate
    )
    tokens_per_s = sum(len(life.tokens) for life in ended) / span_s
    ttfts = sorted(((life.first_at or 0.0) - life.added_at) * 1e3 for life in ended)
    prompts = sum(life.num_prompt_tokens for life in ended)
    busy = [engine.busy_s / span_s for engine in fleet.engines]
    place_times = sorted(took for frontend in fleet.frontends for took in frontend.place_times)
    digest_times = sorted(took for frontend in fleet.frontends for took in frontend.digest_times)
    cells = [
        options.num_engines,
        options.traffic,
        "router" if options.has_router else "round-robin",
        f"{tokens_per_s:,.0f}",
        f"{tokens_per_s / offered:.2f}",
        f"{sum(life.num_cached_tokens for life in ended) / prompts:.1%}",
        *(f"{find_quantile(ttfts, fraction):,.0f}" for fraction in (0.5, 0.9, 0.99)),
        f"{max((life.longest_silence_s for life in ended if life.num_moves), default=0.0):.2f}",
        sum(life.num_moves for life in fleet.lives),
        len(fleet.wrong),
        f"{min(busy):.0%}",
        f"{sum(busy) / len(busy):.0%}",
        f"{max(busy):.0%}",
        f"{find_quantile(place_times, 0.5) * 1e6:.0f}",
        f"{find_quantile(digest_times, 0.5) * 1e6:.0f}",
    ]
    return "  ".join(str(cell).rjust(len(name)) for cell, name in zip(cells, _COLUMNS, strict=True))


def find_quantile(ordered: Sequence[float], fraction: float) -> float:
    """Of values in rising order; NaN without any."""
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))] if ordered else float("nan")


def print_header() -> None:
    """What the columns are."""
    print("  ".join(_COLUMNS))
