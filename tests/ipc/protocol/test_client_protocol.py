"""The client's side of the protocol, event by event: no socket, no process, and time is a number."""

from __future__ import annotations

import msgspec
import pytest
from child_fakes import FakeProcess
from fakes import make_request
from protocol_client import CODEC, FACTS, GARBLED, NOW, Client
from quire.ipc.errors import (
    ConfigError,
    EngineDeadError,
    EngineStartError,
    ProtocolError,
)
from quire.ipc.processes.liveness import ASK_AFTER_S, LISTEN_TIMEOUT_S, ChildWatch
from quire.ipc.processes.restarts import LOSS_WINDOW_S, MAX_LOSSES
from quire.ipc.protocol.client_protocol import LOST_CALL, RECONNECT_TIMEOUT_S, REGREET_AFTER_S, ClientProtocol
from quire.ipc.protocol.codec import PING
from quire.ipc.protocol.messages import (
    MAX_REQUESTS_PER_FRAME,
    PROTOCOL_VERSION,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    Hello,
    LeaseCheck,
    ProtocolNotice,
    StartupProgress,
    UtilityCall,
    UtilityMethod,
    UtilityResult,
    Welcome,
)
from quire.ipc.protocol.request_price import MAX_SHARED_BYTES


@pytest.fixture
def client() -> Client:
    return Client()


def outputs(*tokens: int, start: int = 0, epoch: str = "first", name: str = "a") -> EngineCoreOutputs:
    return EngineCoreOutputs([EngineCoreOutput(name, start, [*tokens])], epoch)


def names(messages: list[msgspec.Struct]) -> list[str]:
    """The requests and the other messages that were sent."""
    return [one.request_id if isinstance(one, EngineCoreRequest) else type(one).__name__ for one in messages]


# Hello and Welcome.


def test_hello_is_said_on_a_connection_and_nothing_else_before_the_welcome(client: Client) -> None:
    client.protocol.add_requests([make_request("early", [1])], NOW)
    assert client.sent() == []
    number = client.connect()
    client.protocol.add_requests([make_request("late", [1])], NOW)
    assert client.sent() == []
    client.hear(Welcome(PROTOCOL_VERSION, "first", FACTS, number))
    assert names(client.sent()) == ["early", "late"]


def test_a_welcome_counts_once_and_of_the_last_number_only(client: Client) -> None:
    before = client.connect()
    client.protocol.add_requests([make_request("a", [1])], NOW)
    client.protocol.connection_lost(NOW)
    client.hear(Welcome(PROTOCOL_VERSION, "first", FACTS, before))
    assert not client.protocol.is_open, "before the next Hello"
    number = client.connect()
    for said, is_open in ((before, False), (number, True), (number, True)):
        client.hear(Welcome(PROTOCOL_VERSION, "first", FACTS, said))
        assert client.protocol.is_open == is_open
    assert names(client.sent()) == ["a"]


def test_the_phase_of_a_start_is_the_last_and_others_business_may_come_before_the_welcome(
    client: Client,
) -> None:
    client.connect()
    assert client.protocol.phase is None
    for message in (StartupProgress("start worker"), LeaseCheck(), StartupProgress("load"), UtilityResult(0)):
        assert client.hear(message) == []
    assert client.protocol.phase == "load"


@pytest.mark.parametrize("message", [outputs(1), ProtocolNotice("what?")])
def test_what_makes_no_sense_before_the_first_welcome_is_an_error(
    client: Client, message: msgspec.Struct
) -> None:
    client.connect()
    with pytest.raises(ProtocolError, match=f"{type(message).__name__} came before Welcome"):
        client.hear(message)


@pytest.mark.parametrize("was_open", [False, True])
def test_who_is_forgotten_while_it_waits_says_hello_again_and_once(client: Client, was_open: bool) -> None:
    if was_open:
        client.attach()
    client.connect()
    client.hear(StartupProgress("start worker"))
    for later in (0.1, REGREET_AFTER_S, REGREET_AFTER_S + 0.1):
        assert client.hear(ProtocolNotice("Hello and its Welcome come first"), NOW + later) == []
    (hello,) = client.sent()
    assert isinstance(hello, Hello)
    client.hear(Welcome(PROTOCOL_VERSION, "first", FACTS, hello.number))
    assert client.protocol.is_open


@pytest.mark.parametrize("message", [outputs(1), ProtocolNotice("what?"), UtilityResult(1)])
def test_it_is_of_the_past_before_a_later_welcome(client: Client, message: msgspec.Struct) -> None:
    client.attach()
    client.protocol.connection_lost(NOW)
    client.connect()
    assert client.hear(message) == []


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), 1e9])
def test_a_weight_that_no_engine_takes_is_refused(weight: float) -> None:
    with pytest.raises(ConfigError, match="client_weight"):
        ClientProtocol(weight=weight)


# Requests, through one engine after the other.


@pytest.mark.parametrize("is_told", [True, False])
def test_unfinished_requests_are_added_again_with_their_tokens(client: Client, is_told: bool) -> None:
    client.attach()
    for name in ("a", "b", "c"):
        client.protocol.add_requests([make_request(name, [1])], NOW)
    client.protocol.abort_requests(["b"])
    abort = client.protocol.outbox.pop()
    assert names(client.sent()) == ["a", "b", "c"]
    client.protocol.outbox.append(abort)
    assert client.hear(outputs(4, 5)) == outputs(4, 5).outputs
    if is_told:  # else another connection is made without the end of this one
        client.protocol.connection_lost(NOW)
        assert not client.protocol.outbox
    again = client.attach()
    assert names(again) == ["a", "b", "c", "AbortRequests"]
    assert isinstance(again[0], EngineCoreRequest)
    assert (again[0].output_token_ids, again[0].is_resumed) == (b"\4\0\0\0\5\0\0\0", True)


@pytest.mark.parametrize(("epoch", "num_attempts"), [("first", 0), ("second", 1)])
def test_only_another_engine_counts_as_a_loss_of_the_one_before(
    client: Client, epoch: str, num_attempts: int
) -> None:
    client.attach()
    client.protocol.add_requests([make_request("a", [1])], NOW)
    client.protocol.connection_lost(NOW)
    (again,) = client.attach(epoch)
    assert isinstance(again, EngineCoreRequest)
    assert again.num_attempts == num_attempts


def test_outputs_of_an_earlier_life_of_the_engine_are_dropped(client: Client) -> None:
    client.attach()
    client.protocol.add_requests([make_request("a", [1])], NOW)
    assert client.hear(outputs(4)) == outputs(4).outputs
    client.attach("second")
    assert client.hear(outputs(5, start=1)) == []
    assert client.hear(outputs(6, start=1, epoch="second")) == outputs(6, start=1).outputs


def test_requests_that_come_together_share_frames_within_bounds(client: Client) -> None:
    client.attach()
    requests = [make_request(f"{index}", [1]) for index in range(MAX_REQUESTS_PER_FRAME + 2)]
    client.protocol.add_requests(requests, NOW)
    full, rest = (CODEC.decode(frames) for frames in client.protocol.outbox)
    assert full.requests + rest.requests == requests
    assert len(full.requests) == MAX_REQUESTS_PER_FRAME
    client.protocol.connection_lost(NOW)
    assert len(client.attach("second")) == len(requests)
    large = [make_request(name, [1] * (MAX_SHARED_BYTES // 4)) for name in ("a", "b")]
    client.protocol.add_requests([*large, make_request("c", [1])], NOW)  # each has a frame
    assert [type(CODEC.decode(frames)) for frames in client.protocol.outbox] == [EngineCoreRequest] * 3


# Utility calls.


def test_a_call_is_answered_once(client: Client) -> None:
    client.attach()
    call_id = client.protocol.start_call(UtilityMethod.STATS)
    assert client.sent() == [UtilityCall(call_id, UtilityMethod.STATS)]
    client.hear(UtilityResult(call_id))
    client.hear(UtilityResult(call_id + 1))
    assert client.protocol.answers == {call_id: UtilityResult(call_id)}
    client.protocol.end_call(call_id)
    client.hear(UtilityResult(call_id))
    assert client.protocol.answers == {}


def test_a_call_is_made_again_when_the_connection_was_lost_in_the_middle(client: Client) -> None:
    client.attach()
    answered, given_up, waiting = (client.protocol.start_call(UtilityMethod.STATS) for _ in range(3))
    client.hear(UtilityResult(answered))
    client.protocol.end_call(given_up)
    client.protocol.connection_lost(NOW)
    assert client.attach() == [UtilityCall(waiting, UtilityMethod.STATS)]
    client.hear(UtilityResult(waiting))
    assert set(client.protocol.answers) == {answered, waiting}


def test_a_call_ends_with_an_engine_that_has_others_beside_it(client: Client) -> None:
    client.attach()
    client.protocol.has_others = True
    lost = client.protocol.start_call(UtilityMethod.STATS)
    client.protocol.connection_made(NOW)  # begins anew: the engine is there
    assert client.protocol.answers == {}
    client.attach()
    client.protocol.connection_lost(NOW)
    assert client.protocol.answers == {lost: UtilityResult(lost, LOST_CALL)}
    waiting = client.protocol.start_call(UtilityMethod.STATS)
    client.protocol.connection_lost(NOW)
    assert client.attach() == [UtilityCall(waiting, UtilityMethod.STATS)]


def test_a_client_is_idle_while_nothing_is_owed_to_it(client: Client) -> None:
    assert not client.protocol.is_idle
    client.attach()
    assert client.protocol.is_idle
    call_id = client.protocol.start_call(UtilityMethod.STATS)
    assert not client.protocol.is_idle
    client.protocol.end_call(call_id)
    client.protocol.add_requests([make_request("a", [1])], NOW)
    assert not client.protocol.is_idle


# What is garbled.


def test_a_frame_that_does_not_decode_begins_anew_until_there_were_too_many(client: Client) -> None:
    client.attach()
    client.protocol.add_requests([make_request("a", [1])], NOW)
    for _ in range(MAX_LOSSES):
        client.sent()
        assert client.protocol.frames_received(GARBLED, NOW) == []
        assert client.protocol.frames_received(GARBLED, NOW) == [], "the second is of the past"
        (hello,) = client.sent()
        assert isinstance(hello, Hello)
        client.hear(Welcome(PROTOCOL_VERSION, "first", FACTS, hello.number))
        assert names(client.sent()) == ["a"]
    with pytest.raises(EngineDeadError, match="its engine do not decode"):
        client.protocol.frames_received(GARBLED, NOW)


def test_frames_that_do_not_decode_now_and_then_are_no_end(client: Client) -> None:
    for i in range(3 * MAX_LOSSES):
        client.attach()
        client.protocol.frames_received(GARBLED, NOW + i * LOSS_WINDOW_S)
    client.protocol.check()


def test_a_frame_that_does_not_decode_is_an_error_at_the_first_start(client: Client) -> None:
    client.connect()
    with pytest.raises(ProtocolError):
        client.protocol.frames_received(GARBLED, NOW)


def test_a_request_that_the_engine_cannot_read_fails_alone(client: Client) -> None:
    client.attach()
    for name in "ab":
        client.protocol.add_requests([make_request(name, [1])], NOW)
    [end] = client.hear(ProtocolNotice("it does not decode", "a"))
    assert (end.request_id, end.finish_reason, end.error) == ("a", FinishReason.ERROR, "it does not decode")
    assert client.hear(ProtocolNotice("it does not decode", "a")) == []  # it has ended
    assert (client.protocol.is_open, len(client.protocol.ledger)) == (True, 1)


def test_after_any_other_message_that_the_engine_cannot_read_it_is_brought_up_to_date(client: Client) -> None:
    client.attach()
    client.protocol.add_requests([make_request("a", [1])], NOW)
    client.sent()
    assert client.hear(ProtocolNotice("it does not decode")) == []
    assert [type(message) for message in client.sent()] == [Hello]
    added = client.attach()
    assert [message.request_id for message in added if isinstance(message, EngineCoreRequest)] == ["a"]
    client.protocol.check()


# The engine's end, and time.


def test_a_planned_restart_is_due_at_its_time_and_over_when_it_is_done(client: Client) -> None:
    client.attach()
    client.protocol.engine_ended("SIGKILL", 0.5, NOW)
    assert (client.protocol.next_deadline, client.protocol.is_idle) == (NOW + 0.5, False)
    client.protocol.check()
    client.protocol.engine_started(None)
    assert client.protocol.next_deadline is None


@pytest.mark.parametrize(("was_ready", "error"), [(False, EngineStartError), (True, EngineDeadError)])
def test_an_engine_that_nobody_starts_again_is_the_end(
    client: Client, was_ready: bool, error: type[Exception]
) -> None:
    if was_ready:
        client.attach()
    client.protocol.engine_ended("SIGKILL", None, NOW)
    client.protocol.end("the engine was closed")
    assert client.protocol.next_deadline is None
    with pytest.raises(error, match="SIGKILL"):
        client.protocol.check()


def test_what_arrived_before_the_end_is_delivered(client: Client) -> None:
    client.attach()
    client.protocol.add_requests([make_request("a", [1])], NOW)
    client.protocol.engine_ended("SIGKILL", None, NOW)
    assert client.hear(outputs(4)) == outputs(4).outputs


def test_an_engine_that_is_away_too_long_is_given_up(client: Client) -> None:
    client.attach()
    client.protocol.connection_lost(NOW)
    assert client.protocol.next_deadline == NOW + RECONNECT_TIMEOUT_S
    client.protocol.time_passed(NOW + RECONNECT_TIMEOUT_S - 1.0)
    client.protocol.check()
    number = client.connect(NOW + 1.0)  # nobody answers
    client.protocol.time_passed(NOW + RECONNECT_TIMEOUT_S)
    with pytest.raises(EngineDeadError, match="no connection to the engine for 600 s"):
        client.protocol.check()
    client.hear(Welcome(PROTOCOL_VERSION, "late", FACTS, number))
    assert not client.protocol.is_open


def test_a_silent_engine_is_asked_then_killed_unless_it_is_away() -> None:
    process = FakeProcess()
    client = Client(ChildWatch(process))
    client.attach()
    assert client.protocol.next_deadline == NOW + ASK_AFTER_S
    client.protocol.time_passed(NOW + ASK_AFTER_S)
    assert [*client.protocol.outbox] == [PING]
    client.protocol.note_heard(NOW + 1.0)
    assert client.protocol.next_deadline == NOW + 1.0 + ASK_AFTER_S
    client.protocol.connection_lost(NOW + 1.0)
    client.protocol.time_passed(NOW + 10.0)
    assert (process.done, [*client.protocol.outbox]) == ([], [])
    client.connect(NOW + 20.0)  # watched from Hello on, once it was ready
    while (at := client.protocol.next_deadline) is not None and at < NOW + 40.0:
        client.protocol.time_passed(at)
    assert process.done == ["dump", "kill: it did not answer"]


def test_an_engine_that_does_not_listen_in_time_is_killed_once() -> None:
    process = FakeProcess()
    watch = ChildWatch(process)
    watch.expect_listening(NOW)
    client = Client(watch)
    num_looks = 0
    while (at := client.protocol.next_deadline) is not None and num_looks < 100:
        client.protocol.time_passed(at)
        num_looks += 1
    assert process.done == ["dump", f"kill: it did not listen within {LISTEN_TIMEOUT_S:g} s"]
