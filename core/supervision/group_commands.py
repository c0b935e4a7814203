"""Commands to a daemon: drains, restarts, additions and removals of engines, each over many turns.

A command is a generator that is advanced once a turn, after arrived messages were taken; it yields while it
waits for an engine. An engine that is lost meanwhile is replaced as always.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator

from ...ipc.daemon.daemon_control import (
    AddEngine,
    Answer,
    Command,
    CommandDone,
    CommandRefused,
    DrainEngine,
    RemoveEngine,
    RestartEngines,
    ResumeEngine,
)
from ...ipc.errors import DaemonError, QuireError
from .supervised_engine import SupervisedEngine
from .supervised_group import SupervisedGroup

_log = logging.getLogger(__name__)

RESTART_DRAIN_TIMEOUT_S = 30.0  # requests that still run then go on after the restart
MAX_COMMANDS = 64  # at a time

Steps = Generator[None, None, CommandDone]


class GroupCommands:
    """The commands in progress. `tell` is called with each one's answer."""

    def __init__(self, group: SupervisedGroup, tell: Callable[[str, Answer], None]) -> None:
        self._group = group
        self._tell = tell
        self._running: list[tuple[str, Steps]] = []
        self._busy: set[int] = set()  # engines that are being restarted or removed
        self._is_restarting_all = False

    def start(self, sender: str, command: Command) -> None:
        """Begin a command at the next `advance`."""
        if len(self._running) >= MAX_COMMANDS:
            self._tell(sender, CommandRefused(f"{MAX_COMMANDS} commands are being done already"))
            return
        self._running.append((sender, self._make_steps(command)))

    def advance(self) -> None:
        """Advance each command as far as it can go."""
        for entry in list(self._running):
            sender, steps = entry
            try:
                next(steps)
                continue
            except StopIteration as end:
                answer: Answer = end.value
            except QuireError as error:
                answer = CommandRefused(str(error), type(error).__name__)
                _log.warning("%s", error)
            self._running.remove(entry)
            self._tell(sender, answer)

    def _make_steps(self, command: Command) -> Steps:
        match command:
            case DrainEngine(index=index):
                return self._drain(index)
            case ResumeEngine(index=index):
                return self._resume(index)
            case AddEngine():
                return self._add()
            case RemoveEngine(index=index):
                return self._remove(index)
            case RestartEngines(index=index):
                return self._restart_all() if index is None else self._restart(index)

    def _drain(self, index: int) -> Steps:
        engine = self._take(index)
        self._group.check_others_serve(engine, "drained")
        _log.info("draining engine %d", index)
        engine.drain()
        while engine.state.state != "drained" and engine.is_draining:
            self._check_known(engine)
            _check_lives(engine)
            yield
        if not engine.is_draining:
            raise DaemonError(f"engine {index} was resumed before it was drained")
        return CommandDone()

    def _resume(self, index: int) -> Steps:
        engine = self._take(index)
        _check_lives(engine)
        engine.resume()
        return CommandDone()
        yield  # never reached; it makes this a generator, as all commands are

    def _restart(self, index: int) -> Steps:
        engine = self._take(index)
        yield from self._restart_engine(engine)
        return CommandDone()

    def _restart_all(self) -> Steps:
        """Restart one after the other; the first that does not come back ends the command."""
        if self._is_restarting_all:
            raise DaemonError("the engines are being restarted already")
        self._is_restarting_all = True
        try:
            self._group.set_shares()
            for index in list(self._group.engines):
                while index in self._busy:
                    yield
                if (engine := self._group.engines.get(index)) is not None:
                    yield from self._restart_engine(engine)
        finally:
            self._is_restarting_all = False
        return CommandDone()

    def _restart_engine(self, engine: SupervisedEngine) -> Generator[None, None, None]:
        """Drain it if others can take over, restart it, wait until it is ready, and resume it."""
        index, was_draining = engine.state.index, engine.is_draining
        self._busy.add(index)
        try:
            if engine.is_open and self._group.do_others_serve(engine):
                engine.drain()
                deadline = self._group.clock() + RESTART_DRAIN_TIMEOUT_S
                while engine.state.state != "drained" and self._group.clock() < deadline:
                    yield
            _log.info("restarting engine %d", index)
            self._group.restart(engine)
            if not was_draining:
                engine.resume()
            while not engine.is_open:
                _check_lives(engine)
                yield
        finally:
            self._busy.discard(index)
            if not was_draining:
                engine.resume()

    def _add(self) -> Steps:
        engine = self._group.add()
        index = engine.state.index
        _log.info("adding engine %d", index)
        while not engine.is_open:
            self._check_known(engine)
            if engine.failure is not None:
                self._group.remove(engine)
                raise DaemonError(f"engine {index} did not start: {engine.failure.report.reason}")
            yield
        return CommandDone(index)

    def _remove(self, index: int) -> Steps:
        engine = self._take(index)
        if engine.failure is None:
            yield from self._empty(engine)
        _log.info("removing engine %d", index)
        self._group.remove(engine)
        return CommandDone()

    def _empty(self, engine: SupervisedEngine) -> Generator[None, None, None]:
        """Drain an engine that is to be removed; it stays if no other engine serves any more.

        An engine that was never ready is empty, and may never be ready. One that restarts tells its clients
        of the others when it is back.
        """
        index = engine.state.index
        self._group.check_others_serve(engine, "removed")
        self._busy.add(index)
        engine.drain()
        try:
            while engine.has_been_ready and engine.state.state != "drained" and engine.failure is None:
                yield
            self._group.check_others_serve(engine, "removed")
        except DaemonError:
            engine.resume()
            raise
        finally:
            self._busy.discard(index)

    def _check_known(self, engine: SupervisedEngine) -> None:
        if self._group.engines.get(engine.state.index) is not engine:
            raise DaemonError(f"engine {engine.state.index} was removed")

    def _take(self, index: int) -> SupervisedEngine:
        """An engine that no other command restarts or removes. Raises DaemonError."""
        engine = self._group.find(index)
        if index in self._busy:
            raise DaemonError(f"engine {index} is being restarted or removed already")
        return engine


def _check_lives(engine: SupervisedEngine) -> None:
    if engine.failure is not None:
        raise DaemonError(f"engine {engine.state.index} is lost: {engine.failure.report.reason}")
