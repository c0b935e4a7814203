"""Commands of a daemon's engines, over engines that are only states."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from quire.core.supervision.group_commands import MAX_COMMANDS, GroupCommands
from quire.core.supervision.supervised_engine import EngineFailure
from quire.core.supervision.supervised_group import SupervisedGroup
from quire.ipc.daemon.daemon_control import (
    AddEngine,
    Answer,
    CommandDone,
    CommandRefused,
    DrainEngine,
    RemoveEngine,
    RestartEngines,
    ResumeEngine,
)
from quire.ipc.daemon.daemon_state import EnginePhase, EngineState, FailedReport


@dataclass
class FakeEngine:
    state: EngineState = field(default_factory=lambda: EngineState(index=1, socket="x", state="ready"))
    failure: EngineFailure | None = None
    is_draining: bool = False
    has_been_ready: bool = True

    @property
    def is_open(self) -> bool:
        return self.state.state in ("ready", "draining", "drained")

    def set(self, state: EnginePhase) -> None:
        self.state.state = state

    def drain(self) -> None:
        self.is_draining = True
        if self.is_open:
            self.set("draining")

    def resume(self) -> None:
        self.is_draining = False

    def restart(self) -> None:
        self.set("restarting")


class Bench:
    """Commands to an engine that has another one beside it."""

    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.engines = {1: self.engine}
        self.told: list[tuple[str, Answer]] = []
        self.commands = GroupCommands(cast(SupervisedGroup, self), lambda *one: self.told.append(one))

    # What a group offers.

    def find(self, index: int) -> FakeEngine:
        return self.engines[index]

    def clock(self) -> float:
        return 0.0

    def add(self) -> FakeEngine:
        return self.engine

    def do_others_serve(self, engine: FakeEngine) -> bool:
        return engine is self.engine

    def check_others_serve(self, engine: FakeEngine, wish: str) -> None:
        """They do."""

    def restart(self, engine: FakeEngine) -> None:
        engine.restart()

    def remove(self, engine: FakeEngine) -> None:
        del self.engines[engine.state.index]

    def set_shares(self) -> None:
        """Nobody computes here."""


def test_a_restart_drains_then_ends_then_waits_and_the_engine_takes_requests_again() -> None:
    bench = Bench()
    bench.commands.start("cli", RestartEngines())
    seen: list[tuple[str, bool]] = []
    states: tuple[EnginePhase | None, ...] = ("drained", "ready", None)
    for state in states:
        bench.commands.advance()
        seen.append((bench.engine.state.state, bench.engine.is_draining))
        if state is not None:
            bench.engine.set(state)
    assert seen == [("draining", True), ("restarting", False), ("ready", False)]
    assert bench.told == [("cli", CommandDone())]


def test_an_engine_that_is_being_removed_is_not_drained_or_resumed_by_others() -> None:
    bench = Bench()
    bench.commands.start("one", RemoveEngine(1))
    bench.commands.advance()
    for command in (DrainEngine(1), ResumeEngine(1), RestartEngines(1), RemoveEngine(1)):
        bench.commands.start("other", command)
    bench.commands.advance()
    refusal = CommandRefused("engine 1 is being restarted or removed already")
    assert bench.told == [("other", refusal)] * 4
    bench.engine.set("drained")
    bench.commands.advance()
    assert bench.told[4:] == [("one", CommandDone())]
    assert not bench.engines


def test_a_drain_that_is_taken_back_says_so_and_no_more_than_so_many_wait() -> None:
    bench = Bench()
    for number in range(MAX_COMMANDS + 1):
        bench.commands.start(f"{number}", DrainEngine(1))
    assert bench.told == [(f"{MAX_COMMANDS}", CommandRefused("64 commands are being done already"))]
    bench.commands.advance()
    bench.engine.resume()
    bench.commands.advance()
    assert len(bench.told) == MAX_COMMANDS + 1
    assert bench.told[-1][1] == CommandRefused("engine 1 was resumed before it was drained")


def test_an_engine_that_never_gets_ready_is_removed_and_who_added_it_or_drains_it_is_told() -> None:
    bench = Bench()
    bench.engine.set("starting")
    bench.engine.has_been_ready = False
    for sender, command in (("adds", AddEngine()), ("drains", DrainEngine(1)), ("removes", RemoveEngine(1))):
        bench.commands.start(sender, command)
    bench.commands.advance()
    bench.commands.advance()
    assert bench.told == [
        ("removes", CommandDone()),
        ("adds", CommandRefused("engine 1 was removed")),
        ("drains", CommandRefused("engine 1 was removed")),
    ]


def test_an_engine_that_is_lost_for_good_while_it_is_added_and_removed_is_removed_once() -> None:
    bench = Bench()
    bench.engine.set("starting")
    bench.engine.has_been_ready = False
    for sender, command in (("removes", RemoveEngine(1)), ("adds", AddEngine())):
        bench.commands.start(sender, command)
    bench.engine.failure = EngineFailure(FailedReport("no luck"), 1)
    bench.commands.advance()
    assert bench.told == [("removes", CommandDone()), ("adds", CommandRefused("engine 1 was removed"))]
