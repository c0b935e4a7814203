"""The ledger: what a client knows of its requests, and what it says to an engine that knows none of them."""

from __future__ import annotations

import pytest
from fakes import make_logprobs, make_request
from hypothesis import given
from hypothesis import strategies as st
from protocol_client import unframe
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


def resume(
    ledger: RequestLedger, now: float = NOW, *, is_other_engine: bool = False
) -> list[EngineCoreRequest]:
    """The requests that an engine must be sent."""
    messages = unframe(ledger.resume(now, is_other_engine))
    return [message for message in messages if isinstance(message, EngineCoreRequest)]


# What is delivered, whatever happens on the way.

NUM_POSITIONS, TOKENS, VECTORS = 4, list(range(50, 80)), bytes(range(120))


class Engine:
    """Says what a request makes, from where it is resumed, in pieces."""

    def __init__(self, ledger: RequestLedger, *, is_other_engine: bool = False) -> None:
        (request,) = resume(ledger, is_other_engine=is_other_engine)
        self._pools = request.pooling_params is not None
        self._num_positions = self._num_bytes = 0
        self._num_tokens = len(decode_token_ids(request.output_token_ids))

    def say(self, count: int) -> EngineCoreOutput | None:
        """So many more positions of the prompt, then tokens, or vectors; None when all is said."""
        if self._pools:
            start, self._num_bytes = self._num_bytes, min(len(VECTORS), self._num_bytes + 4 * count)
            end = FinishReason.STOP if self._num_bytes == len(VECTORS) else None
            data = VECTORS[start : self._num_bytes]
            return EngineCoreOutput("r", 0, [], end, pooled=data, pooled_start=start) if data else None
        if (first := self._num_positions + 1) <= NUM_POSITIONS:
            self._num_positions = min(NUM_POSITIONS, self._num_positions + count)
            block = make_logprobs(list(range(first, self._num_positions + 1)), first)
            return EngineCoreOutput("r", self._num_tokens, [], prompt_logprobs=block)
        start, self._num_tokens = self._num_tokens, min(len(TOKENS), self._num_tokens + count)
        end = FinishReason.LENGTH if self._num_tokens == len(TOKENS) else None
        tokens = TOKENS[start : self._num_tokens]
        return EngineCoreOutput("r", start, tokens, end) if tokens else None


class Reader:
    """Merges what is delivered by position, as whoever reads does. Positions and vectors come once."""

    def __init__(self) -> None:
        self.positions: list[int] = []
        self.tokens: list[int] = []
        self.vectors = b""

    def read(self, outputs: list[EngineCoreOutput]) -> None:
        for output in outputs:
            if output.prompt_logprobs is not None:
                self.positions += [-int(one) for one in memoryview(output.prompt_logprobs.logprobs).cast("f")]
            assert output.start <= len(self.tokens)
            self.tokens[output.start :] = output.new_token_ids or self.tokens[output.start :]
            assert output.pooled is None or output.pooled_start == len(self.vectors)
            self.vectors += output.pooled or b""


EVENTS = ["say", "say", "say", "hear", "hear", "hear", "hear again", "miss", "lose", "restart"]


@given(
    events=st.lists(st.sampled_from(EVENTS), min_size=40, max_size=80),
    counts=st.lists(st.integers(1, 5), min_size=1),
    pools=st.booleans(),
)
def test_what_is_lost_repeated_or_said_again_is_delivered_once(
    events: list[str], counts: list[int], pools: bool
) -> None:
    ledger, reader = RequestLedger(), Reader()
    pooling = PoolingParams(task="token_embed") if pools else None
    ledger.add(make_request("r", list(range(9)), prompt_logprobs=0, pooling_params=pooling), NOW)
    engine, said, heard = Engine(ledger), list[EngineCoreOutput](), list[EngineCoreOutput]()
    for number, event in enumerate([*events, *(["lose", *["say", "hear"] * 40])]):
        if len(ledger) == 0:
            break
        match event:
            case "say":
                if (output := engine.say(counts[number % len(counts)])) is not None:
                    said.append(output)
            case "hear" if said:
                heard.append(said.pop(0))
                reader.read(ledger.take(heard[-1:]))
            case "hear again" if heard and heard[-1].prompt_logprobs is None:  # of an earlier connection
                reader.read(ledger.take(heard[-1:]))
            case "miss" if said and said[0].prompt_logprobs is None:  # a connection has ended unnoticed
                said.pop(0)
            case "lose" | "restart":
                engine, said, heard = Engine(ledger, is_other_engine=event == "restart"), [], []
            case _:
                pass
    assert len(ledger) == 0, "it has ended"
    if pools:
        assert reader.vectors == VECTORS
    else:
        assert (reader.positions, reader.tokens) == (list(range(1, NUM_POSITIONS + 1)), TOKENS)
    assert ledger.take([*heard, EngineCoreOutput("never", 0, [1])]) == []


# What an engine is sent.


def test_requests_are_resumed_whole_in_the_order_of_their_arrival(ledger: RequestLedger) -> None:
    ledger.add(make_request("z", [1, 2], max_tokens=9), NOW)
    ledger.add(make_request("a", [3], output=[7, 8]), NOW)
    ledger.add(make_request("gone", [1]), NOW)
    ledger.add(make_request("away", [1], timeout_s=10.0), NOW + 2.0, is_sent=False)
    ledger.take([EngineCoreOutput("a", 2, [9]), EngineCoreOutput("z", 0, [4])])
    for name in ("gone", "never"):
        ledger.remove(name)
    again = resume(ledger, NOW + 9.0)
    assert [one.request_id for one in again] == ["z", "a", "away"]
    assert [decode_token_ids(one.output_token_ids) for one in again] == [[4], [7, 8, 9], []]
    assert [one.is_resumed for one in again] == [True, True, False]
    assert [one.age_s for one in again] == [9.0, 9.0, 7.0]
    assert [one.options.timeout_s for one in again] == [None, None, pytest.approx(3.0)]
    assert (decode_token_ids(again[0].prompt_token_ids), again[0].sampling_params.max_tokens) == ([1, 2], 9)
    *_, late = resume(ledger, NOW + 13.0)
    assert late.is_resumed
    assert late.options.timeout_s is not None
    assert 0.0 < late.options.timeout_s < 0.01  # 0 is not allowed on the wire, and none would be for ever


def test_what_was_aborted_while_away_is_added_and_aborted_again(ledger: RequestLedger) -> None:
    for name in ("a", "b", "c"):
        ledger.add(make_request(name, [1]), NOW)
    ledger.abort(["b", "c", "never"])
    ledger.take([EngineCoreOutput("c", 0, [], FinishReason.ABORT)])
    for _ in range(2):  # for as long as its last output has not come
        *_, abort = ledger.resume(NOW)
        assert abort == AbortRequests(["b"])
        assert [one.request_id for one in resume(ledger)] == ["a", "b"]


def test_engines_that_are_lost_in_a_row_without_a_token_in_between_are_counted(ledger: RequestLedger) -> None:
    for name in ("stuck", "moving", "unsent"):
        ledger.add(make_request(name, [1]), NOW, is_sent=name != "unsent")

    def attempts(*, is_other_engine: bool = True) -> list[int]:
        return [one.num_attempts for one in resume(ledger, is_other_engine=is_other_engine)]

    assert attempts() == [1, 1, 0]
    ledger.take([EngineCoreOutput("moving", 0, [4])])
    assert attempts() == [2, 1, 1]
    assert attempts(is_other_engine=False) == [2, 1, 1]
    assert attempts() == [3, 2, 2]


# From one ledger to another.


def test_what_is_given_up_goes_on_in_another_ledger_with_its_tokens(ledger: RequestLedger) -> None:
    for name in ("a", "b", "c"):
        ledger.add(make_request(name, [1], timeout_s=10.0), NOW)
    ledger.take([EngineCoreOutput("b", 0, [4, 5])])
    ledger.abort(["c"])
    other = RequestLedger()
    messages = unframe(other.adopt(ledger.release(is_lost=False), NOW + 4.0, is_open=True))
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
    (request,) = resume(other, is_other_engine=True)
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
    (resumed,) = resume(other, is_other_engine=True)
    assert resumed.num_attempts == SUSPECT_ATTEMPTS
