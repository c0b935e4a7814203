"""Fleets on simulated time: nothing is lost, and the router finds what engines have."""

from __future__ import annotations

import random
from typing import Any

import pytest
from quire.tools.sim.fleet.fleet import Fleet
from quire.tools.sim.fleet.step_costs import STEP_COSTS, StepCosts
from quire.tools.sim.fleet.traffic import Traffic, draw_arrivals

COSTS = StepCosts("made up", 4.0, (1, 64, 2048), (0.02, 0.04, 0.4))


def play(traffic: Traffic, *, has_router: bool, num_losses: int = 0, num_drains: int = 0) -> Fleet:
    duration_s = 25.0
    arrivals = list(draw_arrivals(traffic, 4, 4.0, duration_s, random.Random(1)))
    fleet = Fleet(4, 2, COSTS, has_router=has_router)
    fleet.play(arrivals, duration_s, num_losses, num_drains)
    assert len(fleet.lives) == len(arrivals)
    assert fleet.wrong == []
    return fleet


def look(fleet: Fleet) -> list[Any]:
    return [(life.first_at, life.ended_at, life.engine) for life in fleet.lives]


def count_cached(fleet: Fleet) -> int:
    return sum(life.num_cached_tokens for life in fleet.lives)


def test_losses_and_drains_lose_no_request_and_change_no_token() -> None:
    fleet = play("random", has_router=True, num_losses=2, num_drains=1)
    assert sum(life.num_moves for life in fleet.lives) > 0


def test_the_router_finds_prefixes_that_a_turn_misses() -> None:
    turned, routed = (play("prefix", has_router=has_router) for has_router in (False, True))
    assert count_cached(routed) > 1.5 * count_cached(turned)
    assert look(routed) == look(play("prefix", has_router=True))  # every time


def test_costs_lie_on_a_line_between_measured_ones() -> None:
    assert [COSTS.find(count) for count in (1, 64, 2048)] == pytest.approx([0.02, 0.04, 0.4])
    assert COSTS.find(1056) == pytest.approx(0.22)
    assert COSTS.find(4032) == pytest.approx(0.76)
    for costs in STEP_COSTS.values():
        assert list(costs.tokens) == sorted(costs.tokens)
        assert len(costs.tokens) == len(costs.seconds)
