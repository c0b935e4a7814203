"""simulate: many seeds, a summary, and what is needed to repeat a failure."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable

from .run import run_scenario
from .scenario import Scenario, draw_group_scenario, draw_scenario
from .violation import Violation

EXIT_OK = 0
EXIT_VIOLATED = 1
_MAX_TRIES = 400  # some 4 ms each


def simulate(seeds: Iterable[int], has_groups: bool = False) -> int:
    """Play the seeds until one fails, with `has_groups` over several engines. Prints a summary, or the
    failure; returns the exit code.
    """
    draw = draw_group_scenario if has_groups else draw_scenario
    began = time.perf_counter()
    counts: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    for seed in seeds:
        try:
            outcome = run_scenario(draw(seed))
        except Violation:
            print(describe_failure(seed, has_groups))
            return EXIT_VIOLATED
        counts.update(
            seeds=1,
            events=outcome.num_events,
            turns=outcome.num_turns,
            requests=outcome.num_requests,
            tokens=outcome.num_tokens,
        )
        counts["core crashes"] += outcome.num_core_crashes
        ends.update(outcome.ends)
    elapsed = time.perf_counter() - began
    print(", ".join(f"{count:,} {name}" for name, count in counts.items()), f"in {elapsed:.1f} s")
    print("ends: " + ", ".join(f"{name} {count:,}" for name, count in ends.most_common()))
    return EXIT_OK


def describe_failure(seed: int, has_groups: bool = False) -> str:
    """What is wrong with a seed that fails, all its options, and the smallest part of it that still fails."""
    scenario = (draw_group_scenario if has_groups else draw_scenario)(seed)
    option = " --groups" if has_groups else ""
    small = shrink(scenario)
    return "\n".join(
        [
            f"seed {seed} fails: {find_violation(scenario)}",
            scenario.describe(),
            f"without what it does not need: {find_violation(small)}",
            small.describe(),
            f"again: python -m quire.tools.sim --first {seed} --seeds 1{option}",
        ]
    )


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
    while is_smaller and num_tries < _MAX_TRIES:
        is_smaller = False
        for smaller in scenario.list_smaller():
            num_tries += 1
            if find_violation(smaller) is not None:
                scenario, is_smaller = smaller, True
                break
            if num_tries == _MAX_TRIES:
                break
    return scenario
