"""Beam search in the core: which beams survive, and that neither neighbours nor accidents change them."""

from __future__ import annotations

import itertools
from array import array
from typing import Any

import pytest
from fakes import VOCAB_SIZE, FakeEngine, make_config, make_request
from hypothesis import given, settings
from hypothesis import strategies as st
from quire.core.scheduling.beam_search import Beam, BeamSearchState, Candidates
from quire.ipc.params.beam_search import BeamSearch
from quire.ipc.protocol.messages import EngineCoreRequest, ErrorCode, FinishReason
from quire.ipc.spec.config import SchedulerConfig, SchedulingPolicy
from quire.tools.sim.fake_worker import expected_beams

Logprobs = dict[tuple[int, ...], list[float]]  # output so far -> logprob of each token


# -- the selection


@settings(max_examples=60, deadline=None)
@given(data=st.data(), num_tokens=st.integers(1, 4), penalty=st.sampled_from([-1.0, 0.0, 1.0, 2.0]))
def test_a_beam_as_wide_as_all_sequences_finds_the_best_of_all(
    data: st.DataObject, num_tokens: int, penalty: float
):
    vocab, eos = 3, 0
    logprob = st.integers(-40, -1).map(lambda value: value / 8)  # sums are exact in float32
    table: Logprobs = {
        output: data.draw(st.lists(logprob, min_size=vocab, max_size=vocab))
        for length in range(num_tokens)
        for output in itertools.product(range(1, vocab), repeat=length)
    }
    width = 2 ** (num_tokens + 1)
    found = run_search(table, BeamSearch(width, penalty, "never"), [eos], num_tokens)
    every: dict[tuple[int, ...], float] = {}
    for output, values in table.items():
        total = sum(table[output[:i]][token] for i, token in enumerate(output))
        for token, value in enumerate(values):
            if token == eos or len(output) + 1 == num_tokens:
                every[*output, token] = (total + value) / (len(output) + 1) ** penalty
    assert found == pytest.approx(dict(sorted(every.items(), key=lambda item: -item[1])[:width]))


def run_search(table: Logprobs, search: BeamSearch, eos: list[int], num_tokens: int) -> dict[Any, float]:
    state = BeamSearchState(search, eos, num_tokens)
    while not state.is_done:
        state.advance([list_candidates(table[tuple(beam.token_ids)]) for beam in state.running])
    return {tuple(array("i", one.logprobs.token_ids)): one.score for one in state.to_hypotheses()}


def list_candidates(values: list[float]) -> Candidates:
    ids = sorted(range(len(values)), key=lambda token_id: (-values[token_id], token_id))
    return Candidates(array("i", ids), array("f", [values[token_id] for token_id in ids]))


@settings(max_examples=100, deadline=None)
@given(data=st.data(), width=st.integers(1, 6))
def test_those_that_go_on_are_the_best_of_all_and_of_equals_the_first(data: st.DataObject, width: int):
    # Beside 2^20 float32 is in eighths: logprobs that differ by less make equal sums.
    totals = data.draw(st.lists(st.sampled_from([0.0, -1.0, -(2.0**20)]), min_size=width, max_size=width))
    logprob = st.integers(-6, -1).map(lambda value: value / 16)
    candidates = [
        list_candidates(data.draw(st.lists(logprob, min_size=2 * width, max_size=2 * width))) for _ in totals
    ]
    state = BeamSearchState(BeamSearch(width), [99], 9)
    state.running = [Beam(cumulative_logprob=total) for total in totals]
    every = sorted(
        (-array("f", [total + logprob])[0], parent, token_id)
        for parent, (total, own) in enumerate(zip(totals, candidates, strict=True))
        for token_id, logprob in zip(*own, strict=True)
    )
    parents = state.advance(candidates)
    assert [
        (-beam.cumulative_logprob, parent, beam.token_ids[0])
        for parent, beam in zip(parents, state.running, strict=True)
    ] == every[:width]


def test_early_stopping_says_when_a_search_ends():
    falling = {(1,) * n: [-0.5 * n - 0.5, -0.25, -9.0] for n in range(8)}
    falling |= {(2, *output): [-9.0, -9.0, -9.0] for output in falling}
    states: dict[Any, int] = {}
    for stopping in (True, False, "never"):
        state = BeamSearchState(BeamSearch(1, 1.0, stopping), [0], 7)
        while not state.is_done:
            state.advance([list_candidates(falling[tuple(beam.token_ids)]) for beam in state.running])
        states[stopping] = state.num_rounds
    assert states[True] <= states[False] <= states["never"]


# -- the core


def make_engine(
    num_blocks: int = 64, *, max_model_len: int = 64, block_size: int = 8, **scheduler: Any
) -> FakeEngine:
    config = make_config(
        max_model_len=max_model_len, block_size=block_size, scheduler=SchedulerConfig(**scheduler)
    )
    return FakeEngine(config, num_blocks)


def make_search(i: int = 0, *, width: int = 4, num_prompt: int = 11, **fields: Any) -> EngineCoreRequest:
    fields = {"max_tokens": 20, "beam_search": BeamSearch(width)} | fields
    return make_request(f"beam {i}", [i + 1] * num_prompt, **fields)


def check(engine: FakeEngine, request: EngineCoreRequest, max_model_len: int = 64) -> None:
    final = engine.finals[request.request_id]
    assert final.finish_reason in (FinishReason.STOP, FinishReason.LENGTH), final
    assert final.beams == expected_beams(request, max_model_len)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
@pytest.mark.parametrize("run_ahead", [1, 2])
def test_beams_are_those_of_a_search_without_an_engine(policy: SchedulingPolicy, run_ahead: int):
    engine = make_engine(max_num_seqs=8, policy=policy, run_ahead=run_ahead)
    requests = [make_search(i, width=1 + i, num_prompt=5 + 3 * i) for i in range(5)]
    others = [make_request(f"plain {i}", [9, i], max_tokens=30) for i in range(4)]
    for request in [*requests, *others]:
        engine.add(request)
    while engine.turn():
        assert engine.core.check_integrity() == []
    for request in requests:
        check(engine, request)
    assert all(len(engine.tokens[other.request_id]) == 30 for other in others)
    assert engine.core.check_integrity() == []


def test_beams_share_the_blocks_of_their_prompt():
    engine = make_engine(max_num_seqs=4)
    engine.add(make_search(num_prompt=40))
    most = 0
    while engine.turn():
        most = max(most, engine.core.stats().kv_blocks_used)
    assert most <= 5 + 4 * 3
    assert sum(sum(step.num_tokens) for step in engine.steps) == 40 + 4 * 19
    assert sum(len(step.new_requests) for step in engine.steps) == 1


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_a_search_without_blocks_for_its_beams_lets_those_go_on_who_hold_them(policy: SchedulingPolicy):
    # Of another tenant, it would be computed up to its beams for ever, before the long prompt gets on.
    engine = make_engine(10, policy=policy, max_num_seqs=4, max_num_batched_tokens=2, run_ahead=1)
    search = make_search(width=3, num_prompt=30, max_tokens=2)
    engine.add(make_request("long", list(range(40)), max_tokens=2), b"one")
    for _ in range(2):
        engine.turn()
    engine.add(search, b"two")
    engine.run(max_turns=1000)
    check(engine, search)


def test_a_search_survives_preemption_and_lost_workers():
    engine = make_engine(24, max_num_seqs=8, max_num_batched_tokens=16)
    requests = [make_search(i, num_prompt=20, max_tokens=30) for i in range(2)]
    for request in requests:
        engine.add(request)
    for turn in range(10_000):
        if turn in (9, 25, 60):
            engine.lose_worker()
        if not engine.turn():
            break
        assert engine.core.check_integrity() == []
    assert engine.core.stats().num_preemptions_total > 3
    for request in requests:
        check(engine, request)


def test_a_culprit_that_searches_fails_alone():
    engine = make_engine(max_num_seqs=8)
    engine.worker.poisoned.add("beam 0")
    for i in range(2):
        engine.add(make_search(i, width=3))
    engine.run()
    assert engine.finals["beam 0"].error_code is ErrorCode.POISON_REQUEST
    check(engine, make_search(1, width=3))
    assert engine.core.check_integrity() == []


@pytest.mark.parametrize("num_turns", [0, 4])  # the prompt's row, or those of all beams
@pytest.mark.parametrize("code", [ErrorCode.BAD_LOGITS, ErrorCode.BAD_GRAMMAR])
def test_bad_rows_end_a_search_once(num_turns: int, code: ErrorCode):
    engine = make_engine(max_num_seqs=8)
    engine.add(make_search())
    for _ in range(num_turns):
        engine.turn()
    (engine.worker.bad if code is ErrorCode.BAD_LOGITS else engine.worker.stuck).add("beam 0")
    engine.run()
    assert engine.finals["beam 0"].error_code is code
    assert engine.core.check_integrity() == []


def test_a_search_can_be_aborted_at_any_time():
    for num_turns in range(12):
        engine = make_engine(max_num_seqs=4)
        engine.add(make_search())
        for _ in range(num_turns):
            engine.turn()
        engine.core.abort_requests(b"client", ["beam 0"])
        engine.deliver()
        engine.run()
        assert engine.finals["beam 0"].finish_reason is FinishReason.ABORT
        assert engine.core.check_integrity() == []
        assert engine.core.stats().kv_blocks_used == 0


def test_a_search_runs_in_steps_of_fewer_rows_than_it_has_beams():
    engine = make_engine(max_num_seqs=8)
    engine.core._scheduler.batch.limit_steps(16, 2)  # pyright: ignore[reportPrivateUsage]
    engine.add(make_search())
    engine.run()
    check(engine, make_search())
    assert max(len(step.rows) for step in engine.steps) == 2
    engine.core._scheduler.batch.limit_steps(64, 8)  # pyright: ignore[reportPrivateUsage]
    assert engine.core.check_integrity() == []


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"width": 9}, "max_num_seqs=8"),
        ({"eos_token_ids": list(range(VOCAB_SIZE))}, "tokens"),
        ({"output": [1]}, "output_token_ids"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"width": 8, "num_prompt": 30, "max_tokens": 34}, "KV blocks"),
    ],
)
def test_a_search_that_can_never_run_is_refused(fields: dict[str, Any], text: str):
    engine = make_engine(24, max_num_seqs=8)
    engine.add(make_search(**fields))
    final = engine.finals["beam 0"]
    assert final.error_code is ErrorCode.REFUSED
    assert text in str(final.error)
