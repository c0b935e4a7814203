"""The ledger: what a client knows of its requests, and what it says to an engine that knows none of them."""

from __future__ import annotations

import pytest
from fakes import make_logprobs, make_request
from quire.ipc.params.pooling_params import PoolingParams
from quire.ipc.protocol.messages import (
    SUSPECT_ATTEMPTS,
    AbortRequests,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
)
from quire.ipc.protocol.request_ledger import RequestLedger
from quire.ipc.protocol.token_ids import decode_token_ids

NOW = 100.0


@pytest.fixture
def ledger() -> RequestLedger:
    return RequestLedger()


def outputs_in(ledger: RequestLedger) -> dict[str, list[int]]:
    """Request id -> the tokens with which it would be added again."""
    requests = [message for message in ledger.resume(NOW) if isinstance(message, EngineCoreRequest)]
    return {request.request_id: decode_token_ids(request.output_token_ids) for request in requests}


def prompt_positions(outputs: list[EngineCoreOutput]) -> list[int]:
    """The prompt positions that were delivered; a fake's logprob at a position is minus the position."""
    blocks = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
    return [-int(value) for block in blocks for value in memoryview(block.logprobs).cast("f")]


def test_a_request_is_resumed_with_the_tokens_it_has_received(ledger: RequestLedger) -> None:
    ledger.add(make_request("a", [1, 2], max_tokens=9), NOW)
    ledger.add(make_request("b", [3], output=[7, 8]), NOW)
    ledger.take([EngineCoreOutput("a", 0, [4]), EngineCoreOutput("a", 1, [5, 6])])
    ledger.take([EngineCoreOutput("b", 2, [9])])
    assert outputs_in(ledger) == {"a": [4, 5, 6], "b": [7, 8, 9]}
    resumed = ledger.resume(NOW)[0]
    assert isinstance(resumed, EngineCoreRequest)
    assert decode_token_ids(resumed.prompt_token_ids) == [1, 2]
    assert resumed.sampling_params.max_tokens == 9


def test_engines_that_are_lost_in_a_row_without_a_token_in_between_are_counted(ledger: RequestLedger) -> None:
    ledger.add(make_request("stuck", [1]), NOW)
    ledger.add(make_request("moving", [1]), NOW)
    ledger.add(make_request("unsent", [1]), NOW, is_sent=False)

    def attempts() -> list[int]:
        return [
            one.num_attempts
            for one in ledger.resume(NOW, is_other_engine=True)
            if isinstance(one, EngineCoreRequest)
        ]

    assert attempts() == [1, 1, 0]
    ledger.take([EngineCoreOutput("moving", 0, [4])])
    assert attempts() == [2, 1, 1]
    assert [one.num_attempts for one in ledger.resume(NOW) if isinstance(one, EngineCoreRequest)] == [2, 1, 1]
    assert attempts() == [3, 2, 2]


def test_requests_are_resumed_in_the_order_of_their_arrival(ledger: RequestLedger) -> None:
    for name in ("z", "a", "m"):
        ledger.add(make_request(name, [1]), NOW)
    ledger.take([EngineCoreOutput("m", 0, [4])])
    assert list(outputs_in(ledger)) == ["z", "a", "m"]


def test_an_overlap_is_entered_once_and_delivered_for_the_reader_to_merge(ledger: RequestLedger) -> None:
    ledger.add(make_request("a", [1]), NOW)
    ledger.take([EngineCoreOutput("a", 0, [4, 5, 6])])
    again = EngineCoreOutput("a", 1, [5, 6, 7])
    assert ledger.take([again]) == [again]
    ledger.take([EngineCoreOutput("a", 0, [4])])
    assert outputs_in(ledger) == {"a": [4, 5, 6, 7]}


def test_an_output_beyond_a_gap_is_dropped_and_its_request_is_kept(ledger: RequestLedger) -> None:
    ledger.add(make_request("a", [1]), NOW)
    ledger.take([EngineCoreOutput("a", 0, [4])])
    assert ledger.take([EngineCoreOutput("a", 3, [9], FinishReason.LENGTH)]) == []
    assert outputs_in(ledger) == {"a": [4]}
    assert ledger.take([EngineCoreOutput("a", 1, [5])]) == [EngineCoreOutput("a", 1, [5])]


def test_outputs_of_finished_and_unknown_requests_are_dropped(ledger: RequestLedger) -> None:
    ledger.add(make_request("a", [1]), NOW)
    last = EngineCoreOutput("a", 0, [4], FinishReason.LENGTH)
    assert ledger.take([last, EngineCoreOutput("never", 0, [1])]) == [last]
    assert ledger.take([last, EngineCoreOutput("a", 1, [5])]) == []
    assert len(ledger) == 0
    assert ledger.resume(NOW) == []


def test_a_removed_request_is_not_resumed(ledger: RequestLedger) -> None:
    ledger.add(make_request("a", [1]), NOW)
    ledger.remove("a")
    ledger.remove("never")
    assert ledger.resume(NOW) == []


def test_what_was_aborted_while_away_is_added_and_aborted_again(ledger: RequestLedger) -> None:
    for name in ("a", "b", "c"):
        ledger.add(make_request(name, [1]), NOW)
    ledger.abort(["b", "c", "never"])
    ledger.take([EngineCoreOutput("c", 0, [], FinishReason.ABORT)])
    *requests, abort = ledger.resume(NOW)
    assert [request.request_id for request in requests if isinstance(request, EngineCoreRequest)] == [
        "a",
        "b",
    ]
    assert abort == AbortRequests(["b"])
    assert ledger.resume(NOW)[-1] == abort  # for as long as its last output has not come


def test_a_timeout_runs_on_while_there_is_no_engine(ledger: RequestLedger) -> None:
    ledger.add(make_request("a", [1], timeout_s=10.0), NOW)
    ledger.add(make_request("b", [1], timeout_s=10.0), NOW + 2.0)
    ledger.add(make_request("c", [1]), NOW + 2.0)

    def timeouts(now: float) -> dict[str, float | None]:
        return {
            m.request_id: m.options.timeout_s for m in ledger.resume(now) if isinstance(m, EngineCoreRequest)
        }

    assert timeouts(NOW + 9.0) == {"a": pytest.approx(1.0), "b": pytest.approx(3.0), "c": None}
    late = timeouts(NOW + 11.0)
    assert late["b"] == pytest.approx(1.0)
    assert late["a"] is not None
    assert 0.0 < late["a"] < 0.01  # a time-out of 0 is not allowed on the wire, and none would be for ever


def test_a_request_that_is_added_again_says_its_age(ledger: RequestLedger) -> None:
    ledger.add(make_request("a", [1]), NOW)
    ages = [one.age_s for one in ledger.resume(NOW + 9.0) if isinstance(one, EngineCoreRequest)]
    assert ages == [9.0]


def test_prompt_logprobs_that_a_resumed_engine_says_again_are_cut_off(ledger: RequestLedger) -> None:
    ledger.add(make_request("a", list(range(9)), prompt_logprobs=0), NOW)

    def say(first: int, last: int, tokens: list[int] | None = None) -> EngineCoreOutput:
        block = make_logprobs(list(range(first, last + 1)), first)
        return EngineCoreOutput("a", 0, tokens or [], prompt_logprobs=block)

    delivered = ledger.take([say(1, 3)])
    ledger.resume(NOW)
    delivered += ledger.take([say(1, 2)])  # all of it known
    ledger.resume(NOW)  # and lost again
    delivered += ledger.take([say(1, 5), say(6, 8, [4])])
    ledger.resume(NOW)
    delivered += ledger.take([say(1, 8), EngineCoreOutput("a", 1, [5])])
    assert prompt_positions(delivered) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [output.new_token_ids for output in delivered if output.new_token_ids] == [[4], [5]]


def test_what_an_engine_was_sent_before_is_resumed_as_such(ledger: RequestLedger) -> None:
    ledger.add(make_request("sent", [1]), NOW)
    ledger.add(make_request("away", [1]), NOW, is_sent=False)

    def marks() -> dict[str, bool]:
        return {m.request_id: m.is_resumed for m in ledger.resume(NOW) if isinstance(m, EngineCoreRequest)}

    assert marks() == {"sent": True, "away": False}
    assert marks() == {"sent": True, "away": True}


def say_vectors(start: int, data: bytes) -> EngineCoreOutput:
    return EngineCoreOutput("a", 0, [], pooled=data, pooled_start=start)


def make_token_wise_ledger() -> RequestLedger:
    ledger = RequestLedger()
    ledger.add(make_request("a", [1, 2, 3], pooling_params=PoolingParams(task="token_embed")), NOW)
    return ledger


def test_vectors_that_an_engine_says_again_after_a_loss_are_delivered_once() -> None:
    ledger = make_token_wise_ledger()
    assert [one.pooled for one in ledger.take([say_vectors(0, b"1111")])] == [b"1111"]
    ledger.resume(NOW, is_other_engine=True)
    again = [say_vectors(0, b"11112222"), say_vectors(8, b"3333")]
    assert ledger.take(again) == [say_vectors(4, b"2222"), say_vectors(8, b"3333")]


def test_vectors_that_come_twice_or_after_a_gap_are_not_delivered() -> None:
    ledger = make_token_wise_ledger()
    first, second, third = say_vectors(0, b"1111"), say_vectors(4, b"2222"), say_vectors(8, b"3333")
    said = [third, first, first, third, second, first, third]
    assert b"".join(one.pooled or b"" for one in ledger.take(said)) == b"111122223333"


def test_what_is_given_up_goes_on_in_another_ledger_with_its_tokens(ledger: RequestLedger) -> None:
    for name in ("a", "b", "c"):
        ledger.add(make_request(name, [1], timeout_s=10.0), NOW)
    ledger.take([EngineCoreOutput("b", 0, [4, 5])])
    ledger.abort(["c"])
    other = RequestLedger()
    messages = other.adopt(ledger.release(is_lost=False), NOW + 4.0, is_open=True)
    assert (ledger.ids, other.ids) == ([], ["a", "b", "c"])
    requests = [one for one in messages if isinstance(one, EngineCoreRequest)]
    assert [decode_token_ids(one.output_token_ids) for one in requests] == [[], [4, 5], []]
    assert {(one.num_attempts, one.is_resumed, one.options.timeout_s) for one in requests} == {(0, True, 6.0)}
    assert messages[3:] == [AbortRequests(["c"])]
    assert ledger.take([EngineCoreOutput("a", 0, [9])]) == []
    assert other.take([EngineCoreOutput("b", 1, [5, 6])]) != []


def test_what_no_engine_has_is_adopted_without_a_word_and_not_counted_as_lost(ledger: RequestLedger) -> None:
    ledger.add(make_request("a", [1]), NOW, is_sent=False)
    other = RequestLedger()
    assert other.adopt(ledger.release(is_lost=True), NOW, is_open=False) == []
    (request,) = other.resume(NOW, is_other_engine=True)
    assert isinstance(request, EngineCoreRequest)
    assert (request.num_attempts, request.is_resumed) == (0, False)


def test_a_request_moves_after_one_lost_engine_and_stays_after_two(ledger: RequestLedger) -> None:
    for name in ("stuck", "moving"):
        ledger.add(make_request(name, [1]), NOW)
    other = RequestLedger()
    other.adopt(ledger.release(is_lost=True, with_suspects=False), NOW, is_open=True)
    assert other.ids == ["stuck", "moving"]
    other.take([EngineCoreOutput("moving", 0, [4])])
    assert [one.request.request_id for one in other.release(is_lost=True, with_suspects=False)] == ["moving"]
    assert other.ids == ["stuck"]
    (resumed,) = other.resume(NOW, is_other_engine=True)
    assert isinstance(resumed, EngineCoreRequest)
    assert resumed.num_attempts == SUSPECT_ATTEMPTS
