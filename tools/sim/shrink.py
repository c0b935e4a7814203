"""Shrinking: the smallest scenario found that still fails, whatever it fails with."""

from __future__ import annotations

from .run import run_scenario
from .scenario import Scenario
from .sim_link import Violation

MAX_TRIES = 400  # some 4 ms each


def find_violation(scenario: Scenario) -> Violation | None:
    """What goes wrong in this scenario, None if all holds."""
    try:
        run_scenario(scenario)
    except Violation as violation:
        return violation
    return None


def shrink(scenario: Scenario) -> Scenario:
    """`scenario`, which fails, with requests and faults left out for as long as it goes on failing."""
    num_tries = 0
    is_smaller = True
    while is_smaller and num_tries < MAX_TRIES:
        is_smaller = False
        for smaller in scenario.list_smaller():
            num_tries += 1
            if find_violation(smaller) is not None:
                scenario, is_smaller = smaller, True
                break
            if num_tries == MAX_TRIES:
                break
    return scenario
