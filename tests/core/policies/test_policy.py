"""A policy is a part: the table has each, and one that is not the engine's needs no other change."""

from __future__ import annotations

from typing import get_args

import pytest
from fakes import FakeEngine, make_config, make_request
from fakes import make_engine as make_any_engine
from quire.core.policies import POLICIES
from quire.core.policies.fcfs import FcfsPolicy
from quire.core.policies.policy import Policy
from quire.core.scheduling.request import Request
from quire.core.scheduling.request_queue import RequestQueue
from quire.core.scheduling.running_batch import RunningBatch
from quire.core.scheduling.step import Step
from quire.ipc.protocol.messages import EngineCoreRequest
from quire.ipc.protocol.token_ids import count_token_ids
from quire.ipc.spec.config import SchedulerConfig, SchedulingPolicy


class ShortestPromptFirst(FcfsPolicy):
    """Also the one that keeps its place longest."""

    def rank(self, request: EngineCoreRequest) -> int:
        return count_token_ids(request.prompt_token_ids)


class OneClientAtATime(Policy[RequestQueue]):
    """Only requests of the client that runs are admitted; whoever waits for another client's is told."""

    make_queue = RequestQueue

    def choose_prompts(self, step: Step, prefills: list[Request]):
        for request in super().choose_prompts(step, prefills):
            if any(running.client != request.client for running in self.batch.requests):
                return
            yield request

    def note_enter(self, step: Step, request: Request) -> None:
        request.policy_data = (step.step_id, self.monotonic())

    def why_waiting(self, request: Request) -> str:
        return f"{request.request_id} waits for another client"


def make_engine(policy: type[Policy[RequestQueue]], patch: pytest.MonkeyPatch, **changes: int) -> FakeEngine:
    patch.setitem(POLICIES, "fcfs", policy)
    return make_any_engine(32, run_ahead=1, **changes)


def test_every_policy_that_can_be_asked_for_is_in_the_table():
    assert set(POLICIES) == set(get_args(SchedulingPolicy))


def test_the_shortest_prompt_runs_first_and_is_preempted_last(monkeypatch: pytest.MonkeyPatch):
    engine = make_engine(ShortestPromptFirst, monkeypatch, max_num_seqs=2)
    for name, length in (("long", 30), ("short", 2), ("mid", 9)):
        engine.add(make_request(name, [length] * length, max_tokens=4))
    engine.turn()
    assert engine.list_running() == ["short", "mid"]
    engine.run()
    assert list(engine.finals) == ["short", "mid", "long"]


def test_a_policy_may_hold_requests_back_note_what_it_wants_and_say_why(monkeypatch: pytest.MonkeyPatch):
    engine = make_engine(OneClientAtATime, monkeypatch)
    for place in range(6):
        engine.add(make_request(f"r{place}", [place, 1], max_tokens=3), b"one" if place < 2 else b"two")
    engine.turn()
    policy = engine.scheduler.policy
    assert [request.request_id for request in policy.batch.requests] == ["r0", "r1"]
    assert policy.why_waiting(engine.requests["r2"]) == "r2 waits for another client"
    assert all(request.policy_data == (0, 1000.0) for request in policy.batch.requests)
    engine.run()
    assert engine.core.check_integrity() == []


@pytest.mark.parametrize("policy", list(POLICIES.values()))
def test_while_a_cohort_runs_everybody_else_is_parked(policy: type[Policy[RequestQueue]]):
    engine = FakeEngine(make_config(), 32)
    parts: Policy[RequestQueue] = policy(
        RunningBatch(SchedulerConfig(), engine.scheduler.batch.manager, engine.scheduler.times), engine.clock
    )
    for place in range(8):
        engine.add(make_request(f"r{place}", [place], tenant="ab"[place % 2]))
    requests = list(engine.requests.values())
    for request in requests[:7]:
        parts.add(request)
    for cohort in ([requests[2]], [requests[5], requests[3]]):
        parts.run_only(cohort)
        assert set(parts.waiting) == set(cohort)
        assert set(parts.parked) == set(requests[:7]) - set(cohort)
    parts.add(requests[7])
    assert parts.is_parked(requests[7])
    for gone in (requests[3], requests[0]):
        parts.remove(gone)
        parts.note_finish(gone)
    parts.run_all()
    assert set(parts.waiting) == set(requests) - {requests[0], requests[3]}
    assert len(parts.parked) == 0
    assert not parts.is_parked(requests[7])
    assert parts.check() == []
