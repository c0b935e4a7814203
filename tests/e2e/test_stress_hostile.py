"""`quire stress --hostile` for real. Its attacks are tests of their own too, as in tests/frontend/http."""

from __future__ import annotations

import pytest
from quire.frontend.cli.entry import run_command
from quire.tools.stress.hostile.report import format_hostile
from quire.tools.stress.hostile.run import NUM_STREAMS, HostileOptions, play_hostile

pytestmark = pytest.mark.slow

ATTACKS = (
    *("slow-heads", "endless-trailer", "strangers-bodies", "upgrade", "unknown-field", "junk", "junk-behind"),
    *("exploding-masks", "ambiguous-rows", "failing-rows", "flood"),
    *("network-client", "keyless-neighbour"),
)


def test_a_few_attacks_cost_ordinary_streams_nothing() -> None:
    # Latency is what the slow runs are for: here a busy machine must not fail it.
    options = HostileOptions(seed=1, duration_s=4.0, max_tokens=60, attacks=ATTACKS, margin_s=10.0, scale=0.2)
    result = play_hostile(options)
    print(format_hostile(result, options.margin_s))
    assert result.broken == []
    assert {cost.attack for cost in result.costs} == set(ATTACKS)
    # A turn is short here, and one that is late by more than it leaves its neighbour no sample alone.
    assert sum(cost.latency is not None for cost in result.costs) > len(ATTACKS) // 2
    assert {report.attack for report in result.reports} == set(ATTACKS)
    assert len(result.records) >= NUM_STREAMS
    assert {record.end for record in result.records} == {"finished"}


@pytest.mark.timeout(300)
def test_every_attack_in_a_minute_breaks_no_invariant() -> None:
    assert run_command(["stress", "--hostile", "--duration", "60"]) == 0


@pytest.mark.timeout(900)
def test_five_minutes_of_attacks_break_no_invariant() -> None:
    assert run_command(["stress", "--hostile"]) == 0
