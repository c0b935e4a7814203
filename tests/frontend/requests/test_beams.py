"""Beam search: which beams survive, and that neither neighbours nor accidents of an engine change them."""

from __future__ import annotations

import itertools
from array import array
from typing import Any

import pytest
from fakes import FakeEngine, make_config, make_request
from hypothesis import given, settings
from hypothesis import strategies as st
from quire.frontend.outputs import RequestOutput
from quire.frontend.requests.beams import Beam, BeamSearchState, Candidates, begin_search
from quire.frontend.requests.input_processor import EngineInput
from quire.frontend.requests.output_processor import OutputProcessor
from quire.ipc.params.beam_search import BeamSearch
from quire.ipc.protocol.messages import ErrorCode
from quire.ipc.protocol.token_ids import decode_token_ids
from quire.ipc.spec.config import SchedulerConfig, SchedulingPolicy
from quire.tools.sim.fake_worker import expected_beams

Logprobs = dict[tuple[int, ...], list[float]]  # output so far -> logprob of each token


# -- the selection


@settings(max_examples=40)
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
    assert list(found.values()) == sorted(found.values(), reverse=True)


def run_search(table: Logprobs, search: BeamSearch, eos: list[int], num_tokens: int) -> dict[Any, float]:
    state = BeamSearchState(search, eos, num_tokens)
    while not state.is_done:
        state.advance([list_candidates(table[tuple(beam.token_ids)]) for beam in state.running])
    return {tuple(one.beam.token_ids): one.score for one in state.finished}


def list_candidates(values: list[float]) -> Candidates:
    ids = sorted(range(len(values)), key=lambda token_id: (-values[token_id], token_id))
    return Candidates(array("i", ids), array("f", [values[token_id] for token_id in ids]))


@settings(max_examples=60)
@given(data=st.data(), width=st.integers(1, 6))
def test_those_that_go_on_are_the_best_of_all_and_of_equals_the_first(data: st.DataObject, width: int):
    # Beside 2^20 float32 is in eighths: logprobs that differ by less make equal sums.
    totals = data.draw(st.lists(st.sampled_from([0.0, -1.0, -(2.0**20)]), min_size=width, max_size=width))
    logprob = st.integers(-6, -1).map(lambda value: value / 16)
    candidates = [
        list_candidates(data.draw(st.lists(logprob, min_size=2 * width, max_size=2 * width))) for _ in totals
    ]
    state = BeamSearchState(BeamSearch(width), [99], 9)
    state.running = [
        Beam(array("i", [parent]), array("f", [total]), array("i", [1]), total)
        for parent, total in enumerate(totals)
    ]
    every = sorted(
        (-array("f", [total + logprob])[0], parent, token_id)
        for parent, (total, own) in enumerate(zip(totals, candidates, strict=True))
        for token_id, logprob in zip(*own, strict=True)
    )
    state.advance(candidates)
    assert [(-beam.cumulative_logprob, *beam.token_ids) for beam in state.running] == every[:width]


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


# -- over an engine

MAX_MODEL_LEN = 64


class SearchingClient:
    """A frontend of one engine, for which requests and searches are the same."""

    def __init__(self, num_blocks: int = 64, *, enable_prefix_caching: bool = True, **scheduler: Any) -> None:
        config = make_config(
            max_model_len=MAX_MODEL_LEN,
            block_size=8,
            scheduler=SchedulerConfig(**scheduler),
            enable_prefix_caching=enable_prefix_caching,
        )
        self.engine = FakeEngine(config, num_blocks)
        self.processor = OutputProcessor(None, self.engine.clock)
        self.finals: dict[str, RequestOutput] = {}
        self._num_read = 0

    def add(self, request: EngineInput) -> None:
        self.processor.add_request(request, self._take)
        self.engine.add(request.sequences[0])

    def abort(self, request_id: str) -> None:
        self.engine.core.abort_requests(b"client", self.processor.abort_requests([request_id]))
        self.engine.deliver()
        self.read()

    def turn(self) -> bool:
        """A step; then what follows from its results, in the engine too."""
        has_run = self.engine.turn()
        has_read = self.read()
        assert self.engine.core.check_integrity() == []
        return has_run or has_read

    def run(self) -> None:
        while self.turn():
            pass
        assert not self.processor.num_unfinished
        assert not self.engine.core.num_unfinished
        assert self.engine.core.stats().kv_blocks_used == 0

    def read(self) -> bool:
        outputs, self._num_read = self.engine.outputs[self._num_read :], len(self.engine.outputs)
        followup = self.processor.process_outputs(outputs)
        if followup.ids_to_abort:
            self.engine.core.abort_requests(b"client", followup.ids_to_abort)
            self.engine.deliver()
        for request in followup.requests:
            self.engine.add(request)
        return bool(outputs)

    def _take(self, output: RequestOutput) -> None:
        assert output.finished
        assert output.request_id not in self.finals
        self.finals[output.request_id] = output

    def check(self, search: EngineInput) -> None:
        """It has found what it finds without an engine."""
        beams = self.finals[search.request_id].outputs
        assert [(one.token_ids, one.beam_score, one.finish_reason) for one in beams] == [
            (one.beam.token_ids.tolist(), one.score, str(one.finish_reason)) for one in expected_beams(search)
        ]


def make_search(i: int = 0, *, width: int = 4, num_prompt: int = 11, **fields: Any) -> EngineInput:
    fields = {"max_tokens": 20} | fields
    request = make_request(f"beam {i}", [i + 1] * num_prompt, **fields)
    search, first = begin_search(request, BeamSearch(width), MAX_MODEL_LEN)
    prompt = decode_token_ids(request.prompt_token_ids)
    return EngineInput(
        request.request_id, None, prompt, request.sampling_params, 0.0, [first], beam_search=search
    )


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
@pytest.mark.parametrize("run_ahead", [1, 2])
def test_beams_are_those_of_a_search_without_an_engine(policy: SchedulingPolicy, run_ahead: int):
    client = SearchingClient(max_num_seqs=8, policy=policy, run_ahead=run_ahead)
    searches = [make_search(i, width=1 + i, num_prompt=5 + 3 * i) for i in range(5)]
    for search in searches:
        client.add(search)
    for i in range(4):
        client.engine.add(make_request(f"plain {i}", [9, i], max_tokens=30))
    client.run()
    for search in searches:
        client.check(search)
    assert all(len(client.engine.tokens[f"plain {i}"]) == 30 for i in range(4))


def test_no_token_of_a_beam_is_computed_twice():
    client = SearchingClient(max_num_seqs=4)
    client.add(make_search(num_prompt=40))
    client.run()
    assert sum(sum(step.num_tokens) for step in client.engine.steps) == 40 + 4 * 19


@pytest.mark.parametrize(
    "engine",
    [
        {"enable_prefix_caching": False},
        {"num_blocks": 24, "max_num_batched_tokens": 16},  # beams' blocks make way for others'
        {"max_num_seqs": 2},  # fewer than a search has beams
    ],
)
def test_a_search_that_finds_little_in_the_cache_is_as_right(engine: dict[str, Any]):
    engine = {"max_num_seqs": 8} | engine
    client = SearchingClient(**engine)
    searches = [make_search(i, num_prompt=20, max_tokens=30) for i in range(2)]
    for search in searches:
        client.add(search)
    client.run()
    for search in searches:
        client.check(search)


def test_a_search_survives_preemption_and_lost_workers():
    client = SearchingClient(num_blocks=24, max_num_seqs=8, max_num_batched_tokens=16)
    searches = [make_search(i, num_prompt=20, max_tokens=30) for i in range(2)]
    for search in searches:
        client.add(search)
    client.engine.add(make_request("long", list(range(30)), max_tokens=30))
    for turn in itertools.count():
        if turn in (9, 25, 60):
            client.engine.lose_worker()
            client.read()
        if not client.turn():
            break
    client.run()
    assert client.engine.core.stats().num_preemptions_total
    for search in searches:
        client.check(search)


@pytest.mark.parametrize("num_turns", [0, 4])  # the prompt's round, or one of all beams
def test_a_search_with_a_request_that_fails_ends_once_and_alone(num_turns: int):
    client = SearchingClient(max_num_seqs=8)
    searches = [make_search(i, width=3) for i in range(2)]
    for search in searches:
        client.add(search)
    for _ in range(num_turns):
        client.turn()
    client.engine.worker.poisoned.add(client.processor.find_engine_ids(["beam 0"])[-1])
    client.run()
    final = client.finals["beam 0"]
    assert (final.error_code, final.outputs[0].finish_reason) == (str(ErrorCode.POISON_REQUEST), "error")
    client.check(searches[1])


@pytest.mark.parametrize("is_late", [False, True])  # the round's results are on their way already
@pytest.mark.parametrize("num_turns", range(6))
def test_a_search_can_be_aborted_at_any_time(num_turns: int, is_late: bool):
    client = SearchingClient(max_num_seqs=4)
    client.add(make_search())
    for _ in range(num_turns):
        client.turn()
    if is_late:
        client.engine.turn()
    client.abort("beam 0")
    client.run()
    assert client.finals["beam 0"].outputs[0].finish_reason == "abort"


def test_the_time_of_a_search_is_that_of_all_its_rounds():
    client = SearchingClient(max_num_seqs=4)
    began = client.engine.clock.now
    client.add(make_search(timeout_s=6.5))
    for _ in range(8):  # a second each
        client.engine.core.expire(client.engine.clock.now)
        client.engine.deliver()
        client.turn()
    client.run()
    final = client.finals["beam 0"]
    assert final.outputs[0].finish_reason == "abort"
    assert client.engine.clock.now - began <= 8


@pytest.mark.parametrize("name", ["beam 0", "mine"])  # the id that live views show, and one of the user's
@pytest.mark.parametrize("num_turns", range(4))
def test_a_search_ends_by_name_also_between_two_rounds(num_turns: int, name: str):
    client = SearchingClient(max_num_seqs=4)
    client.add(make_search(names=["mine"]))
    client.add(make_search(1))
    for _ in range(num_turns):
        client.turn()
    client.engine.turn()  # the engine may have none of it now
    client.engine.core.abort_requests(b"another client", [], [name])
    client.engine.core.abort_requests(b"a third", [], [f"nobody's {number}" for number in range(5000)])
    client.engine.deliver()
    client.run()
    assert client.finals["beam 0"].outputs[0].finish_reason == "abort"
    client.check(make_search(1))
    later = make_search(2, names=["mine"], arrival_time=client.engine.clock.now + 1)
    client.add(later)
    client.run()
    client.check(later)
