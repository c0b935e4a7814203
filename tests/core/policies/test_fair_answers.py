"""The fair policy: what an answer takes beside another tenant's crowd."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fakes import FakeEngine, make_config, make_request
from quire.core.policies.step_pacer import BESIDE_S
from quire.ipc.protocol.messages import EngineCoreRequest
from quire.ipc.protocol.step import ModelRunnerOutput
from quire.ipc.spec.config import SchedulerConfig


def measure_answers(
    run_ahead: int, crowd: Callable[[int], EngineCoreRequest], num_waiting: int
) -> list[float]:
    """Seconds that answers of 24 tokens take, the first of them alone, the others beside another's crowd.

    A step takes 1 ms and 70 us a token.
    """
    scheduler = SchedulerConfig(
        policy="fair", max_num_seqs=256, max_num_batched_tokens=2048, run_ahead=run_ahead
    )
    engine = FakeEngine(make_config(max_model_len=2048, scheduler=scheduler), 40_000, verify=False)
    num_others = 0
    took_s: list[float] = []

    def turn() -> None:
        nonlocal num_others
        while took_s and len(engine.scheduler.waiting) < num_waiting:
            num_others += 1
            engine.add(crowd(num_others), b"crowd")
        while engine.launch() is not None:
            pass
        if not engine.executor.pending:
            engine.clock.advance(0.001)
            return
        engine.clock.advance(0.001 + 7e-5 * engine.scheduler.in_flight[0].num_scheduled_tokens)
        answer = engine.executor.collect()
        assert isinstance(answer, ModelRunnerOutput)
        engine.core.update(answer)
        engine.deliver()

    for number in range(8):
        name, began = f"light{number}", engine.clock.now
        engine.add(make_request(name, [7, number] * 6, max_tokens=24), b"light")
        while name not in engine.finals:
            turn()
        took_s.append(engine.clock.now - began)
        for _ in range(3):
            turn()
    return took_s


@pytest.mark.parametrize("run_ahead", [1, 2])
def test_requests_that_come_and_go_within_a_step_at_most_double_anothers_answer(run_ahead: int) -> None:
    def make_short(number: int) -> EngineCoreRequest:
        return make_request(f"short{number}", [number % 997, 2, 3, 4, 5], max_tokens=1)

    alone_s, *others_s = measure_answers(run_ahead, make_short, 300)
    assert max(others_s[3:]) <= 2 * alone_s + 0.1


@pytest.mark.parametrize(
    ("run_ahead", "num_waiting", "num_prompt_tokens"),
    [(1, 1, 120), (2, 4, 120), (1, 30, 120), (2, 1, 1500), (1, 4, 1500), (2, 30, 1500)],
)
def test_few_long_prompts_of_another_at_most_double_an_answer(
    run_ahead: int, num_waiting: int, num_prompt_tokens: int
) -> None:
    def make_long(number: int) -> EngineCoreRequest:
        return make_request(f"long{number}", [number % 997, 2, 3] * (num_prompt_tokens // 3), max_tokens=2)

    alone_s, *others_s = measure_answers(run_ahead, make_long, num_waiting)
    assert max(others_s[3:]) <= 2 * alone_s + 0.1 + 24 * BESIDE_S
