"""A client's engines as one: with real protocols, whose messages are played, and time that is a number."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import pytest
from fakes import make_request
from frontend_fakes import make_facts
from quire.frontend.client.engine_group import DIGEST_INTERVAL_S, MAX_ASKED, EngineGroup
from quire.ipc.protocol.client_protocol import ClientProtocol
from quire.ipc.protocol.codec import make_client_codec
from quire.ipc.protocol.messages import (
    PROTOCOL_VERSION,
    AbortRequests,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequests,
    ErrorCode,
    FinishReason,
    FrontendCounts,
    Hello,
    UtilityCall,
    UtilityMethod,
    UtilityResult,
    Welcome,
    WorkerStatus,
)
from quire.ipc.protocol.prefix_digest import EngineDigest
from quire.ipc.protocol.token_ids import decode_token_ids

CODEC = make_client_codec()
NOW = 100.0


@dataclass
class Played:
    """An engine: what its client has said to it, and how it is."""

    protocol: ClientProtocol = field(default_factory=ClientProtocol)
    num_lives: int = 0

    def hear(self) -> list[msgspec.Struct]:
        messages = [CODEC.decode(frames) for frames in self.protocol.outbox]
        self.protocol.outbox.clear()
        return [
            one
            for message in messages
            for one in (message.requests if isinstance(message, EngineCoreRequests) else [message])
        ]

    def say(self, message: msgspec.Struct) -> list[EngineCoreOutput]:
        return self.protocol.frames_received(list(CODEC.encode(message)), NOW)

    def connect(self) -> None:
        self.num_lives += 1
        self.protocol.connection_made(NOW)
        self.welcome()

    def welcome(self, has_worker: bool = True) -> None:
        (hello,) = [one for one in self.hear() if isinstance(one, Hello)]
        life, facts = f"life {self.num_lives}", make_facts()
        self.say(Welcome(PROTOCOL_VERSION, life, facts, hello.number, has_worker=has_worker))


class Group:
    """A group of `num_engines` that are there."""

    def __init__(self, num_engines: int = 2) -> None:
        self.group = EngineGroup(block_size=16)
        self.engines = [Played() for _ in range(num_engines)]
        for index, engine in enumerate(self.engines):
            engine.connect()
            self.group.add_engine(index, engine.protocol)
        self.group.settle(NOW)

    def add(self, *names: str) -> None:
        self.group.add_requests([make_request(name, [len(name)]) for name in names], NOW)

    def requests_at(self, index: int) -> dict[str, EngineCoreRequest]:
        heard = self.engines[index].hear()
        return {one.request_id: one for one in heard if isinstance(one, EngineCoreRequest)}

    def say(self, index: int, *outputs: EngineCoreOutput) -> list[EngineCoreOutput]:
        engine = self.engines[index]
        kept = engine.say(EngineCoreOutputs(list(outputs), f"life {engine.num_lives}"))
        return self.group.take_outputs(kept, NOW)

    def set_worker(self, index: int, has_worker: bool) -> None:
        self.engines[index].say(WorkerStatus(has_worker=has_worker))
        self.group.settle(NOW)

    def set_draining(self, index: int, is_draining: bool) -> None:
        self.group.set_draining(index, is_draining)
        self.group.settle(NOW)

    def lose(self, index: int) -> None:
        self.engines[index].protocol.connection_lost(NOW)
        self.group.settle(NOW)

    def come_back(self, index: int) -> None:
        self.engines[index].connect()
        self.group.settle(NOW)


@pytest.fixture
def two() -> Group:
    return Group()


def test_requests_are_spread_and_ended_where_they_are(two: Group) -> None:
    two.add("a", "b", "c", "d")
    assert [list(two.requests_at(index)) for index in range(2)] == [["a", "c"], ["b", "d"]]
    two.group.abort_requests(["a", "b", "d", "unknown"])
    assert two.engines[0].hear() == [AbortRequests(["a"])]
    assert two.engines[1].hear() == [AbortRequests(["b", "d"])]


def test_a_lost_engines_requests_go_on_elsewhere_at_once_with_their_tokens(two: Group) -> None:
    two.add("a", "b")
    assert list(two.requests_at(0)) == ["a"]
    assert two.say(0, EngineCoreOutput("a", 0, [5, 6])) != []
    two.lose(0)
    moved = two.requests_at(1)["a"]
    assert (decode_token_ids(moved.output_token_ids), moved.num_attempts) == ([5, 6], 1)
    assert moved.is_resumed
    assert two.say(0, EngineCoreOutput("a", 2, [7])) == []  # what it said before it was lost
    assert [one.new_token_ids for one in two.say(1, EngineCoreOutput("a", 2, [7]))] == [[7]]
    two.group.abort_requests(["a"])
    assert two.engines[1].hear() == [AbortRequests(["a"])]
    two.come_back(0)
    assert two.requests_at(0) == {}  # it is told of nothing that is elsewhere
    two.add("c")
    assert list(two.requests_at(0)) == ["c"]


def test_with_every_engine_away_requests_wait_for_the_first_that_is_back(two: Group) -> None:
    two.add("a", "b")
    two.lose(0)
    two.lose(1)
    two.add("new")
    two.come_back(1)
    heard = two.requests_at(1)
    assert sorted(heard) == ["a", "b", "new"]
    assert heard["new"].is_resumed is False


def test_a_request_that_two_engines_were_lost_with_waits_for_the_second_and_is_moved_no_more(
    two: Group,
) -> None:
    two.add("poison", "b")
    two.lose(0)
    two.come_back(0)
    two.say(1, EngineCoreOutput("b", 0, [1]))
    two.engines[1].hear()
    two.lose(1)
    assert list(two.requests_at(0)) == ["b"]
    two.come_back(1)
    assert {name: one.num_attempts for name, one in two.requests_at(1).items()} == {"poison": 2}
    two.lose(1)
    two.come_back(1)
    assert {name: one.num_attempts for name, one in two.requests_at(1).items()} == {"poison": 3}
    two.say(1, EngineCoreOutput("poison", 0, [1]))
    two.lose(1)
    assert list(two.requests_at(0)) == ["poison"]  # it has got further


def test_an_engine_without_its_worker_keeps_only_a_request_that_may_have_killed_two(two: Group) -> None:
    two.add("a", "b")
    assert (list(two.requests_at(0)), list(two.requests_at(1))) == (["a"], ["b"])
    two.set_worker(0, False)
    moved = two.requests_at(1)["a"]
    assert (moved.is_resumed, moved.num_attempts) == (True, 1)
    two.engines[0].welcome(has_worker=False)
    two.group.settle(NOW)
    two.add("c")
    assert list(two.requests_at(1)) == ["c"], "it gets nothing new meanwhile"
    two.set_worker(0, True)
    two.set_worker(1, False)
    assert sorted(two.requests_at(0)) == ["b", "c"]
    two.engines[1].welcome(has_worker=False)
    assert two.requests_at(1)["a"].num_attempts == 2, "it will run alone"
    two.group.settle(NOW)
    assert not two.engines[1].hear(), "it is left in peace"


def test_an_engine_that_tests_a_suspect_is_not_disturbed_by_moves(two: Group) -> None:
    two.add("poison", "b")
    two.set_worker(0, False)
    two.engines[0].welcome()
    two.set_worker(1, False)
    two.engines[1].welcome()
    two.group.settle(NOW)
    two.lose(0)
    two.add("c")
    assert {"poison", "c"} <= set(two.requests_at(1))
    two.come_back(0)
    two.set_worker(1, False)
    assert not two.engines[1].hear(), "nobody says Hello, and the request is the same"
    assert "c" in two.engines[1].protocol.ledger.ids
    two.say(1, EngineCoreOutput("poison", 0, [1]))
    two.set_worker(1, True)
    two.set_worker(1, False)
    assert two.engines[1].protocol.ledger.ids == []  # it has got further, and was not to blame


def test_with_no_other_engine_requests_wait_for_the_next_worker() -> None:
    one = Group(1)
    one.add("a")
    one.engines[0].hear()
    one.set_worker(0, False)
    assert not one.engines[0].hear()
    assert one.engines[0].protocol.ledger.ids == ["a"]


def test_a_draining_engine_gives_up_what_it_has_and_drops_it_unanswered(two: Group) -> None:
    two.add("a", "b")
    two.requests_at(0)
    two.say(0, EngineCoreOutput("a", 0, [5]))
    two.set_draining(0, True)
    assert [type(one) for one in two.engines[0].hear()] == [Hello]
    moved = two.requests_at(1)["a"]
    assert (decode_token_ids(moved.output_token_ids), moved.num_attempts) == ([5], 0)
    assert two.say(0, EngineCoreOutput("a", 1, [6])) == []
    two.add("c", "d")
    assert two.requests_at(0) == {}
    two.engines[0].protocol.connection_made(NOW)
    two.engines[0].welcome()
    two.group.settle(NOW)
    assert two.requests_at(0) == {}
    two.set_draining(0, False)
    two.add("e")
    assert list(two.requests_at(0)) == ["e"]


def test_what_the_last_engine_has_stays_with_it_while_it_drains(two: Group) -> None:
    two.lose(1)
    two.add("a")
    two.set_draining(0, True)
    assert two.engines[0].protocol.ledger.ids == ["a"]
    two.come_back(1)
    assert list(two.requests_at(1)) == ["a"]


def test_an_engine_that_is_gone_for_good_leaves_its_suspects_too(two: Group) -> None:
    two.add("a", "b")
    two.lose(0)
    two.come_back(0)
    two.lose(1)
    assert two.engines[1].protocol.ledger.ids == ["a"]
    two.group.remove_engine(1, NOW)
    assert two.requests_at(0)["a"].num_attempts == 2
    two.group.settle(NOW)


def test_what_an_engine_had_that_is_gone_waits_at_one_that_is_away(two: Group) -> None:
    two.add("a", "b", "c", "d")
    two.lose(0)
    two.lose(1)
    assert len(two.engines[1].protocol.ledger) == 4
    two.group.remove_engine(1, NOW)
    two.group.settle(NOW)
    two.come_back(0)
    assert sorted(two.requests_at(0)) == ["a", "b", "c", "d"]


def test_an_engine_that_never_had_a_request_is_not_lost_with_it(two: Group) -> None:
    two.add("a", "b")
    two.lose(0)
    two.lose(1)
    two.group.remove_engine(1, NOW)
    assert sorted(two.engines[0].protocol.ledger.ids) == ["a", "b"]
    two.come_back(0)
    assert {name: one.num_attempts for name, one in two.requests_at(0).items()} == {"a": 2, "b": 1}


def test_one_that_joins_brings_what_is_in_its_ledger(two: Group) -> None:
    third = Played()
    third.protocol.add_requests([make_request("own", [1])], NOW)
    third.connect()
    two.group.add_engine(2, third.protocol)
    two.group.settle(NOW)
    two.group.abort_requests(["own"])
    assert AbortRequests(["own"]) in third.hear()


def test_names_are_ended_everywhere_and_counts_told_once(two: Group) -> None:
    for index in range(2):
        two.engines[index].hear()
    two.group.abort_named(["x"], "t")
    two.group.send(FrontendCounts(1))
    assert two.engines[0].hear() == [AbortRequests([], ["x"], "t"), FrontendCounts(1)]
    assert two.engines[1].hear() == [AbortRequests([], ["x"], "t")]


def test_engines_are_asked_what_they_have_when_they_come_and_then_while_requests_come(two: Group) -> None:
    engine = two.engines[0]
    (call,) = [one for one in engine.hear() if isinstance(one, UtilityCall)]
    assert call.method is UtilityMethod.DIGEST
    two.add("a")
    assert not [one for one in engine.hear() if isinstance(one, UtilityCall)]  # it owes an answer
    engine.say(UtilityResult(call.call_id, digest=EngineDigest(b"", 9, 0)))
    two.group.settle(NOW)
    assert engine.protocol.answers == {}
    two.add("b", "c", "d")
    assert list(two.requests_at(0)) == []  # another client's nine
    later = NOW + DIGEST_INTERVAL_S
    two.group.add_requests([make_request("later", [1])], later)
    assert [one.method for one in engine.hear() if isinstance(one, UtilityCall)] == [UtilityMethod.DIGEST]


def test_a_request_that_has_ended_counts_no_more(two: Group) -> None:
    two.add("a", "b")
    for index, name in enumerate("ab"):
        two.say(index, EngineCoreOutput(name, 0, [1], finish_reason=FinishReason.LENGTH))
    assert two.group.router.find("a") is None
    assert two.group.router.find("b") is None


def test_what_was_said_of_others_is_forgotten_after_a_while(two: Group) -> None:
    for index, num_requests in enumerate((9, 0)):
        (call,) = [one for one in two.engines[index].hear() if isinstance(one, UtilityCall)]
        two.engines[index].say(UtilityResult(call.call_id, digest=EngineDigest(b"", num_requests, 0)))
    two.group.settle(NOW)
    two.group.add_requests([make_request("a", [1])], NOW + 0.5)
    assert list(two.requests_at(1)) == ["a"]
    two.say(1, EngineCoreOutput("a", 0, [1], finish_reason=FinishReason.LENGTH))
    two.group.add_requests([make_request("b", [1])], NOW + 3 * DIGEST_INTERVAL_S)
    assert list(two.requests_at(0)) == ["b"]


REFUSED = EngineCoreOutput("a", 0, [], FinishReason.ERROR, None, "full", error_code=ErrorCode.OVERLOADED)


def test_what_one_engine_has_no_room_for_is_asked_of_another(two: Group) -> None:
    two.add("a")
    assert list(two.requests_at(0)) == ["a"]
    assert two.say(0, REFUSED) == []
    asked = two.requests_at(1)["a"]
    assert not asked.is_resumed  # else it would be taken on in any case
    assert two.group.router.find("a") == 1
    assert [output.new_token_ids for output in two.say(1, EngineCoreOutput("a", 0, [5]))] == [[5]]


def test_a_request_that_every_engine_refuses_is_refused_once(two: Group) -> None:
    two.add("a")
    assert two.say(0, REFUSED) == []
    assert two.say(1, REFUSED) == [REFUSED]
    assert two.group.router.find("a") is None
    assert not two.engines[0].protocol.ledger
    assert not two.engines[1].protocol.ledger


def test_a_request_is_asked_of_few_of_many_engines_and_not_after_its_abort() -> None:
    many = Group(5)
    many.add("a")
    asked: list[int] = []
    while not asked or not many.say(asked[-1], REFUSED):
        index = many.group.router.find("a")
        assert index is not None
        assert index not in asked
        asked.append(index)
    assert len(asked) == MAX_ASKED
    many.add("a")
    many.group.abort_requests(["a"])
    assert many.say(many.group.router.find("a") or 0, REFUSED) == [REFUSED]
