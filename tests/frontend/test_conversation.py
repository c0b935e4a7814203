"""The conversation with an engine, without a socket: which of its lives is listened to."""

from __future__ import annotations

from typing import Any, cast

from fakes import make_config, make_request
from quire.core.engine_facts import StartupClock, make_engine_facts
from quire.frontend.engine_link import Conversation
from quire.frontend.engines import Engine
from quire.ipc.codec import make_client_codec
from quire.ipc.messages import PROTOCOL_VERSION, EngineCoreOutput, EngineCoreOutputs, Welcome
from quire.ipc.step import WorkerReady

FACTS = make_engine_facts(make_config(), WorkerReady(8, "fake", []), {}, StartupClock("start", 0.0))


class ReachableEngine(Engine):
    """An engine that is always there."""

    def check_owner(self) -> None:
        pass

    def describe_end(self) -> None:
        return None

    def stop(self) -> None:
        pass


def be_welcomed(conversation: Conversation, epoch: str) -> None:
    conversation.lose()
    hello = make_client_codec().decode(conversation.hello())
    welcome = Welcome(PROTOCOL_VERSION, epoch, FACTS, hello.number)
    frames = list(make_client_codec().encode(welcome))
    assert conversation.take_welcome(cast(Any, None), frames, None)


def test_outputs_of_an_earlier_life_of_the_engine_are_dropped() -> None:
    conversation = Conversation(ReachableEngine())
    be_welcomed(conversation, "first")
    conversation.ledger.add(make_request("a", [1]))
    first = EngineCoreOutputs([EngineCoreOutput("a", 0, [4])], "first")
    assert conversation.take_outputs(first) == first.outputs
    be_welcomed(conversation, "second")
    assert conversation.take_outputs(EngineCoreOutputs([EngineCoreOutput("a", 1, [5])], "first")) == []
    second = EngineCoreOutputs([EngineCoreOutput("a", 1, [6])], "second")
    assert conversation.take_outputs(second) == second.outputs
