"""What a request makes the core hold is known, bounded, shared and shown; no text of a client steers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from fakes import FakeEngine, make_request
from fakes import make_engine as make_any_engine
from quire.core.clients.client_registry import ClientRegistry
from quire.core.clients.clients import LeaseWatch
from quire.core.scheduling import answer_cost, scheduler
from quire.core.scheduling.answer_cost import SCORED_TOKEN_PRICE
from quire.core.scheduling.request import Request
from quire.core.stats.stats import PERIOD_S
from quire.core.stats.stats_collector import CoreProcessInfo
from quire.ipc.params.sampling_params import RequestOutputKind, SamplingParams
from quire.ipc.protocol.messages import PROTOCOL_VERSION, EngineCoreRequest, ErrorCode, Hello
from quire.ipc.protocol.request_price import find_held_bytes, find_max_frame_bytes, find_result_price
from quire.ipc.protocol.token_lists import MAX_BAD_WORD_TOKENS, TokenLists
from quire.tools.sim.fake_worker import VOCAB_SIZE, FakeClock

PROMPT = [1] * 1000  # 4,000 bytes, and 2,048 for any request


def make_engine(**options: Any) -> FakeEngine:
    return make_any_engine(2000, max_model_len=1100, **options)


def find_live(engine: FakeEngine) -> list[Request]:
    return list(engine.requests.values())


def test_the_price_is_what_is_held_and_comes_back_when_the_request_ends() -> None:
    engine = make_engine()
    request = make_request("r", PROMPT, max_tokens=3, logit_bias={5: 1.0}, stop_token_ids=[7])
    assert find_held_bytes(request) == 2048 + 4000 + 4 + 4 + 4
    engine.add(request)
    assert engine.core.stats().held_bytes == find_held_bytes(request)
    (view,) = engine.core.snapshot(CoreProcessInfo("epoch", 0.0)).requests
    assert view.held_bytes == find_held_bytes(request)
    engine.run()
    assert engine.core.stats().held_bytes == 0
    assert engine.core.check_integrity() == []


def sample_with_grammars(engine: FakeEngine, letters: str) -> list[str]:
    """Run a request with each; which had their first token in each step: then the worker compiles."""
    num_before, letter_of = len(engine.steps), dict[int, str]()
    for number, letter in enumerate(letters):
        name = f"{num_before}-{number}"
        engine.add(make_request(name, [1, number], max_tokens=1, grammar=f"start: /{letter}/"))
    engine.run()
    began: list[str] = []
    for step in engine.steps[num_before:]:
        letter_of |= {new.row: new.grammar[8] for new in step.new_requests}
        sampled = step.rows if step.sampled_rows is None else step.sampled_rows
        began.append("".join(letter_of[row] for row in sampled))
    return [one for one in began if one]


def test_a_step_has_few_new_grammars_and_any_number_of_requests_with_known_ones() -> None:
    engine = make_engine()
    assert sorted(sample_with_grammars(engine, "abc")) == ["a", "b", "c"]
    assert sample_with_grammars(engine, "dcbaef") == ["dcba", "f", "e"], "it has compiled three"
    engine.lose_worker()
    assert sorted(sample_with_grammars(engine, "ab")) == ["a", "b"], "another worker has compiled nothing"


def test_a_grammar_whose_request_ends_before_it_samples_stays_new() -> None:
    engine = make_engine(max_num_batched_tokens=16, max_num_seqs=8)
    engine.add(make_request("r", [1] * 40, max_tokens=2, grammar="start: /a/"))
    assert engine.launch() is not None
    engine.core.abort_requests(b"client", ["r"])
    engine.deliver()
    assert sorted(sample_with_grammars(engine, "ba")) == ["a", "b"]


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_requests_that_hold_too_much_are_refused_with_the_numbers(policy: str) -> None:
    engine = make_engine(max_num_seqs=1, max_queued_bytes=20_000, policy=policy)
    for number in range(4):
        engine.add(make_request(f"flood{number}", PROMPT, max_tokens=2), b"flood")
    final = engine.finals["flood3"]
    assert final.error_code is ErrorCode.OVERLOADED
    assert "it takes 6048 bytes, live requests hold 18144 (18144 of them this tenant's)" in str(final.error)
    assert "max_queued_bytes=20000" in str(final.error)
    engine.add(make_request("light", PROMPT, max_tokens=2), b"light")
    assert ("light" in engine.finals) == (policy == "fcfs")
    engine.run()
    assert engine.core.check_integrity() == []


def test_what_was_taken_on_before_finds_room_up_to_twice_the_bound_and_no_more() -> None:
    engine = make_engine(max_num_seqs=1, max_queued_bytes=20_000)
    for number in range(10):
        resumed = msgspec.structs.replace(make_request(f"r{number}", PROMPT, max_tokens=2), is_resumed=True)
        engine.add(resumed)
    assert list(engine.finals) == ["r6", "r7", "r8", "r9"]  # 7 would be 42 kB


def test_a_request_larger_than_the_bound_runs_alone() -> None:
    engine = make_engine(max_queued_bytes=1)
    engine.add(make_request("r", PROMPT, max_tokens=2))
    engine.run()
    assert len(engine.tokens["r"]) == 2


def test_sequences_of_a_request_share_its_lists_and_its_prompt() -> None:
    engine = make_engine()
    lists = TokenLists(bad_words=bytes(4 * MAX_BAD_WORD_TOKENS), bad_word_lengths=b"\0\x20\0\0")
    for number in range(20):  # as frames bring them: equal, and not the same
        request = make_request(f"r{number}", [number // 10] * 1050, max_tokens=2)
        copy = TokenLists(*(bytes(bytearray(one)) for one in msgspec.structs.astuple(lists)))
        prompt = bytes(bytearray(request.prompt_token_ids))
        engine.add(msgspec.structs.replace(request, token_lists=copy, prompt_token_ids=prompt))
    assert len({id(live.token_lists) for live in find_live(engine)}) == 1
    assert len({id(live.prompt_token_ids) for live in find_live(engine)}) == 2


def test_what_enters_rows_in_one_step_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "MAX_NEW_BYTES", 10_000)
    engine = make_engine(max_num_batched_tokens=8192)
    for number in range(5):
        engine.add(make_request(f"r{number}", [*PROMPT, number], max_tokens=9))
    num_new: list[int] = []
    while step := engine.core.schedule():
        num_new.append(len(step.new_requests))
        engine.core.update(engine.worker.execute(step))
        if sum(num_new) == 5:
            break
    assert num_new == [1, 1, 1, 1, 1]


def test_prompt_tokens_with_logprobs_are_fewer_in_a_step_that_also_decodes() -> None:
    engine = make_engine(max_num_batched_tokens=800)  # of which long prompts get 200 beside decodes
    engine.add(make_request("stream", [1], max_tokens=50))
    engine.turn()
    for number in range(2):
        engine.add(make_request(f"scored{number}", [*PROMPT, number], max_tokens=1, prompt_logprobs=1))
    while "scored1" not in engine.finals:
        assert engine.turn()
    sizes = [[size for size in step.num_tokens if size > 1] for step in engine.steps]
    assert max(map(sum, sizes)) == 200 // SCORED_TOKEN_PRICE


def test_logprobs_of_whole_vocabularies_are_bounded_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_cost, "_ENTRIES_OF_A_TOKEN", 100)
    monkeypatch.setattr(answer_cost, "_MANY_ENTRIES", 100)
    monkeypatch.setattr(answer_cost, "_MAX_SAMPLED_ENTRIES", 2 * (VOCAB_SIZE + 1))
    engine = make_engine(max_num_batched_tokens=90)
    engine.add(make_request("prompt", PROMPT, max_tokens=1, prompt_logprobs=VOCAB_SIZE))
    engine.run()
    assert {count for step in engine.steps for count in step.num_tokens} == {10}
    for number in range(5):
        engine.add(make_request(f"r{number}", [number, 1], max_tokens=4, logprobs=VOCAB_SIZE))
    engine.run()
    assert max(len(step.rows) for step in engine.steps) == 2
    assert len(engine.finals) == 6


@pytest.mark.parametrize(
    ("params", "chunks", "cause"),
    [
        ({"logprobs": -1}, True, "logprobs: -1 alternatives are not in 0..997"),
        ({"prompt_logprobs": 998}, True, "prompt_logprobs: 998 alternatives are not in 0..997"),
        ({"prompt_logprobs": 997}, True, None),
        ({"prompt_logprobs": 997}, False, "prompt_logprobs: 998000 of them in one step, and at most 100"),
    ],
)
def test_logprobs_that_no_step_can_hold_are_refused(
    monkeypatch: pytest.MonkeyPatch, params: dict[str, int], chunks: bool, cause: str | None
) -> None:
    monkeypatch.setattr(answer_cost, "_MAX_WHOLE_ENTRIES", 100)
    engine = make_engine(max_num_batched_tokens=1100, enable_chunked_prefill=chunks)
    engine.add(make_request("a", PROMPT, max_tokens=1, **params))
    engine.run()
    error = engine.finals["a"].error
    assert error is None if cause is None else cause in (error or "")


def test_the_longest_honest_frame_has_room_for_everything() -> None:
    assert find_max_frame_bytes(1000) > 4000 + find_held_bytes(
        EngineCoreRequest("x" * 256, b"", SamplingParams(), 0.0, token_lists=TokenLists(bytes(2**17)))
    )


def test_the_result_of_a_stream_is_packed_and_a_whole_ones_is_not() -> None:
    whole = SamplingParams(n=2, max_tokens=10, logprobs=4, output_kind=RequestOutputKind.FINAL_ONLY)
    stream = SamplingParams(n=2, max_tokens=10, logprobs=4, output_kind=RequestOutputKind.DELTA)
    assert find_result_price(whole, 5, 100, 50) == (20 * 64, 20 * 5 * 384)
    assert find_result_price(stream, 5, 100, 50) == (20 * 64, 20 * 5 * 16)
    assert find_result_price(SamplingParams(max_tokens=None), 95, 100, 50) == (5 * 64, 0)


def test_logprobs_of_the_whole_vocabulary_or_of_some_ids_have_their_price() -> None:
    whole = SamplingParams(max_tokens=10, logprobs=-1, prompt_logprobs=-1)
    assert find_result_price(whole, 5, 100, 50).logprobs_bytes == (10 + 5) * 51 * 384
    some = SamplingParams(max_tokens=10, logprob_token_ids=[3, 4])
    assert find_result_price(some, 5, 100, 50).logprobs_bytes == 10 * 3 * 384


# What clients send and people see.


def test_a_client_cannot_steer_a_terminal_or_a_log() -> None:
    engine = make_engine()
    registry = ClientRegistry("epoch", 0.0, lambda _identity, _message: True)
    registry.core = engine.core
    registry.take(b"c", Hello(PROTOCOL_VERSION, "\x1b]0;owned\x07\nquire: \u202eall is well", 1))
    assert registry.clients[b"c"].describe(0.0).kind == "?]0;owned??quire: ?all is well"
    engine.add(make_request("\x1b[2Jr", [1]))
    assert engine.finals["\x1b[2Jr"].error == "request_id: only printable characters"
    (line,) = engine.core.request_log.take()
    assert line == "request refused: '\\x1b[2Jr': request_id: only printable characters"


def test_a_flood_of_refusals_is_one_line_of_the_log() -> None:
    engine = make_engine()
    lines: list[int] = []
    for number in range(1000):
        engine.add(make_request(f"r{number}", [VOCAB_SIZE]))
        lines.append(len(engine.core.request_log.take()))
    assert sum(lines) == lines[0] == 1
    engine.clock.advance(PERIOD_S)
    (line,) = engine.core.request_log.take()
    assert line.endswith("(and 998 more before it)")


# Connections.


def test_a_storm_of_connections_has_the_clients_checked_within_a_share_of_the_cores_time() -> None:
    clock = FakeClock()
    leases = LeaseWatch(clock)
    num_checks = 0

    def check() -> None:
        nonlocal num_checks
        num_checks += 1
        clock.advance(0.01)

    began = clock.now
    while clock.now < began + 10.0:
        leases.note_disconnect()
        leases.check_if_due(check)
        clock.advance(0.001)
    assert 40 <= num_checks <= 50
    clock.advance(1.0)
    leases.check_if_due(check)
    assert leases.next_check_at is None
