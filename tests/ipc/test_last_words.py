"""What engines say that do not start, end, or will not have a client, by the client side of the protocol."""

from __future__ import annotations

import msgspec
import pytest
from fakes import make_request
from protocol_client import NOW, Client
from quire.ipc.errors import (
    DaemonError,
    EngineDeadError,
    EngineStartError,
    ModelError,
)
from quire.ipc.protocol.client_protocol import LOST_CALL
from quire.ipc.protocol.messages import (
    EngineDead,
    Goodbye,
    Hello,
    Refusal,
    StartupProgress,
    UtilityMethod,
)


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (Refusal("no such model", "ModelError"), ModelError),
        (Refusal("out of luck", "EngineStartError"), EngineStartError),
        (EngineDead("out of luck"), EngineStartError),
    ],
)
def test_a_first_start_that_is_refused_raises_what_it_stands_for(
    client: Client, message: Refusal | EngineDead, error: type[Exception]
) -> None:
    client.connect()
    with pytest.raises(error, match=message.reason):
        client.hear(message)
    assert client.sent() == [Goodbye()]


@pytest.mark.parametrize(
    ("message", "is_final"),
    [
        (Refusal("no such model", "ModelError"), True),
        (Refusal("out of luck", "EngineStartError"), False),
        (EngineDead("out of luck"), True),
    ],
)
def test_a_later_start_is_refused_for_good_only_by_what_cannot_change(
    client: Client, message: Refusal | EngineDead, is_final: bool
) -> None:
    client.attach()
    client.protocol.connection_lost(NOW)
    client.connect()
    if is_final:
        with pytest.raises(EngineDeadError, match=message.reason):
            client.hear(message)
    else:
        assert client.hear(message) == []
        client.protocol.check()
    assert client.sent() == [Goodbye()]


@pytest.mark.parametrize("message", [Refusal("enough", "EngineStartError"), EngineDead("enough")])
def test_last_words_end_it_and_count_more_than_how_the_process_ended(
    client: Client, message: msgspec.Struct
) -> None:
    client.attach()
    client.protocol.add_requests([make_request("a", [1])], NOW)
    client.protocol.engine_ended("exited with code 3", None, NOW)
    with pytest.raises(EngineDeadError, match="enough"):
        client.hear(message)
    assert client.sent() == [Goodbye()]
    with pytest.raises(EngineDeadError, match="enough"):
        client.protocol.check()


def test_of_a_supervised_engine_a_start_that_failed_is_not_the_last_one() -> None:
    client = Client(is_supervised=True)
    client.connect()
    client.hear(StartupProgress("load weights"))
    assert client.hear(Refusal("out of luck")) == []
    assert client.sent() == [Goodbye()]
    client.attach("second")
    client.protocol.end("the daemon has ended")
    with pytest.raises(EngineDeadError, match="the daemon has ended"):
        client.protocol.check()


def test_why_a_start_failed_counts_more_than_that_the_supervisor_has_ended() -> None:
    client = Client(is_supervised=True)
    client.connect()
    client.hear(Refusal("out of luck"))
    client.protocol.check()
    client.protocol.engine_ended("the daemon has ended", None, NOW)
    with pytest.raises(EngineStartError, match="out of luck"):
        client.protocol.check()


def test_an_engine_that_will_not_have_this_client_is_not_waited_for() -> None:
    client = Client(is_supervised=True)
    client.connect()
    with pytest.raises(DaemonError, match="version 4"):
        client.hear(Refusal("version 4", "DaemonError"))


def test_a_refusal_of_an_earlier_hello_is_of_the_past() -> None:
    client = Client(is_supervised=True)
    before = client.connect()
    client.protocol.connection_lost(NOW)
    client.protocol.connection_made(NOW)
    client.hear(Refusal("out of luck", number=before))
    (hello,) = client.sent()
    assert isinstance(hello, Hello), "and no Goodbye, by which the next engine would forget this client"


def test_last_words_of_one_engine_of_several_leave_the_rest_to_the_roster(client: Client) -> None:
    client.attach()
    client.protocol.has_others = True
    call_id = client.protocol.start_call(UtilityMethod.STATS)
    client.sent()
    client.hear(EngineDead("enough"))
    assert client.sent() == [Goodbye()]
    assert not client.protocol.is_open
    assert client.protocol.answers[call_id].error == LOST_CALL
    client.attach("second")
    client.protocol.check()
