"""Daemons that come and go under one server: each is attached to whenever it is there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
from openai_fakes import FakeLLM
from quire.frontend.http.engines import attachments
from quire.frontend.http.engines.attachments import Attachments
from quire.frontend.http.engines.daemon_model import DaemonModel
from quire.frontend.http.engines.server_parts import ServerParts
from quire.frontend.http.options import ServerOptions
from quire.ipc.errors import EngineDeadError, UnknownDaemonError


class Machine:
    """Daemons by name; an attempt to attach to one that is not there fails, and is counted."""

    def __init__(self) -> None:
        self.models = {"one": "chat", "two": "vectors"}
        self.llms: dict[str, FakeLLM] = {}  # the last attached to each
        self.num_failures = 0
        self.error: Exception | None = None

    def attach(self, *, attach: str, client_kind: str) -> FakeLLM:
        assert client_kind == "http"
        machine = self

        class AttachedLLM(FakeLLM):
            async def start(self, _on_phase: object = None) -> None:
                if attach not in machine.models:
                    machine.num_failures += 1
                    raise machine.error or UnknownDaemonError(attach, "")

        llm = AttachedLLM(served_model_name=self.models.get(attach, ""))
        llm.tokenizer = None  # type: ignore[assignment]  # no text process
        if attach in self.models:
            self.llms[attach] = llm
        return llm

    def stop(self, daemon: str) -> None:
        del self.models[daemon]
        self.llms[daemon].die(EngineDeadError(f"the daemon {daemon!r} has ended"))

    async def wait_until(self, is_true: Callable[[], bool]) -> None:
        while not is_true():
            await asyncio.sleep(0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(attachments, "AsyncLLM", machine.attach)
    monkeypatch.setattr(attachments, "_RETRY_S", 0.0)
    return machine


@pytest.fixture
def engines(machine: Machine) -> Iterator[Attachments]:
    """Of the machine's daemons."""
    known = [DaemonModel(daemon, name, 1) for daemon, name in machine.models.items()]
    engines = Attachments(known, ServerParts(ServerOptions()))
    yield engines
    engines.shutdown()


async def test_a_daemon_that_ends_is_away_until_it_is_back(machine: Machine, engines: Attachments) -> None:
    await engines.start()
    chat, vectors = engines.models
    before = vectors.serving
    assert [model.status for model in engines.models] == ["ready", "ready"]
    assert vectors.facts.max_model_len == 128
    machine.stop("two")
    await machine.wait_until(lambda: machine.num_failures > 2)
    assert [model.status for model in engines.models] == ["ready", "away"]
    assert vectors.away_because == "the daemon 'two' has ended"
    assert machine.llms["two"].num_shutdowns == 1
    machine.models["two"] = "vectors"
    await machine.wait_until(lambda: vectors.is_here)
    assert vectors.serving is not before
    assert vectors.status == "ready"
    assert machine.llms["one"].num_shutdowns == 0
    assert chat.serving.llm is machine.llms["one"]
    engines.shutdown()
    assert machine.llms["one"].num_shutdowns >= 1


async def test_a_server_begins_without_a_daemon_that_is_away(machine: Machine, engines: Attachments) -> None:
    del machine.models["one"]
    await engines.start()
    assert [model.status for model in engines.models] == ["away", "ready"]
    assert engines.models[0].away_because == "no daemon 'one' is running"
    assert (engines.models[0].name, engines.models[0].facts.max_model_len) == ("chat", 1)


async def test_a_daemon_comes_back_with_another_model_but_not_with_one_that_is_another_daemons(
    machine: Machine, engines: Attachments
) -> None:
    await engines.start()
    vectors = engines.models[1]
    machine.stop("two")
    machine.models["two"] = "chat"
    await machine.wait_until(lambda: "another name than that of daemon one" in vectors.away_because)
    assert vectors.name == "vectors"
    machine.models["two"] = "larger"
    await machine.wait_until(lambda: vectors.is_here)
    assert vectors.name == "larger"


async def test_what_nobody_expected_keeps_one_engine_away_and_no_other(
    machine: Machine, engines: Attachments
) -> None:
    machine.error = RuntimeError("a bug")
    del machine.models["two"]
    await engines.start()
    assert [model.status for model in engines.models] == ["ready", "away"]
    machine.models["two"] = "vectors"
    await machine.wait_until(lambda: engines.models[1].is_here)


async def test_a_start_does_not_wait_for_ever_for_a_daemon_that_starts(
    machine: Machine, engines: Attachments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attachments, "_FIRST_TRY_S", 0.01)

    def attach(*, attach: str, client_kind: str) -> FakeLLM:
        llm = machine.attach(attach=attach, client_kind=client_kind)
        if attach == "two":
            llm.start = lambda: asyncio.Event().wait()  # type: ignore[method-assign,assignment,return-value]
        return llm

    monkeypatch.setattr(attachments, "AsyncLLM", attach)
    await engines.start()
    assert [model.status for model in engines.models] == ["ready", "loading"]
