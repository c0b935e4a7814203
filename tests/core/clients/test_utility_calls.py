"""UtilityCalls: a flood of calls costs the core a bounded part of its time, and everybody is answered."""

from __future__ import annotations

import pytest
from fakes import FakeEngine, make_config
from quire.core.clients.client_registry import MAX_WAITING_CALLS, ClientRegistry, UtilityCalls
from quire.ipc.protocol.messages import (
    PROTOCOL_VERSION,
    FrontendCounts,
    Hello,
    UtilityCall,
    UtilityMethod,
    UtilityResult,
)
from quire.tools.sim.fake_worker import FakeClock

CHECK, STATS = UtilityMethod.CHECK_INTEGRITY, UtilityMethod.STATS


class Bench:
    """Asking takes 0.1 s of a clock that stands still otherwise."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.calls = UtilityCalls(self.clock)
        self.asked: list[UtilityMethod] = []

    def ask(self, call: UtilityCall) -> UtilityResult:
        self.asked.append(call.method)
        self.clock.advance(0.1)
        return UtilityResult(call.call_id)

    def answer(self) -> list[tuple[bytes, int]]:
        return [(client, result.call_id) for client, _, result in self.calls.answer(self.ask)]


def test_a_flood_is_answered_one_call_a_client_and_round_and_the_core_rests_in_between() -> None:
    bench = Bench()
    for call_id in range(1, 501):
        bench.calls.add(b"flood", UtilityCall(call_id, CHECK))
    bench.calls.add(b"calm", UtilityCall(7, CHECK))
    assert bench.answer() == [(b"flood", 1), (b"calm", 7)]
    assert bench.asked == [CHECK]
    assert bench.answer() == []
    assert bench.calls.next_at == pytest.approx(bench.clock.now + 20 * 0.1 * 2)
    bench.calls.add(b"calm", UtilityCall(8, STATS))
    assert bench.answer() == [(b"calm", 8)]  # another method is not held up
    bench.clock.now = bench.calls.next_at
    assert bench.answer() == [(b"flood", 2)]


def test_calls_that_wait_are_bounded_and_go_with_their_client() -> None:
    bench = Bench()
    for call_id in range(MAX_WAITING_CALLS + 5):
        bench.calls.add(b"flood", UtilityCall(call_id, CHECK))
    for _ in range(MAX_WAITING_CALLS):
        assert len(bench.answer()) == 1
        bench.clock.advance(10.0)
    assert bench.calls.next_at is None
    bench.calls.add(b"flood", UtilityCall(1, CHECK))
    bench.calls.forget(b"flood")
    assert bench.answer() == []
    assert bench.calls.next_at is None


def test_five_hundred_checks_in_one_turn_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    core = FakeEngine(make_config(), 8).core
    num_checks = 0

    def check() -> list[str]:
        nonlocal num_checks
        num_checks += 1
        return []

    monkeypatch.setattr(core, "check_integrity", check)
    sent: list[object] = []
    registry = ClientRegistry("epoch", 0.0, lambda _, message: sent.append(message) is None)
    registry.core = core
    registry.take(b"c", Hello(PROTOCOL_VERSION, "flood", 1))
    for call_id in range(500):
        registry.take(b"c", UtilityCall(call_id, CHECK))
    registry.deliver()
    assert num_checks == 1
    assert UtilityResult(0) in sent


def test_what_frontends_count_is_added_up_over_all_of_them() -> None:
    core = FakeEngine(make_config(), 8).core
    registry = ClientRegistry("epoch", 0.0, lambda _identity, _message: True)
    registry.core = core
    for number, client in enumerate((b"one", b"other"), start=2):
        registry.take(client, Hello(PROTOCOL_VERSION, "http", 1))
        registry.take(client, FrontendCounts(number, 10 * number))
    metrics = core.metrics()
    assert (metrics.tool_parse_errors_total, metrics.reasoning_tokens_total) == (5, 50)
