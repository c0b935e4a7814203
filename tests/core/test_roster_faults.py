"""Every fault at every stage of an engine's life, under clients that came before, meanwhile and afterwards.

What happens to one engine is the roster's: each client's requests end with the tokens of an undisturbed run,
as long as an engine is left, and whoever gave a command hears what became of it. Over (fake) engines.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path

import blocking_client
import daemon_loads
import pytest
from blocking_client import attach_client
from daemon_client import make_requests
from daemon_loads import TIMEOUT_S, assert_undisturbed, collect, make_named_config
from daemons import Daemon, wait_until
from quire.frontend.client.engine_links import EngineLinks
from quire.frontend.client.engines import DaemonEngine
from quire.frontend.daemon import add_engine, drain_engine, remove_engine, restart_engine
from quire.ipc.daemon.daemon_state import EngineState
from quire.ipc.daemon.run_dir import find_named
from quire.ipc.errors import DaemonError
from quire.ipc.spec.config import EngineConfig

pytestmark = pytest.mark.usefixtures("runtime")

NAME = "roster"
NUM_REQUESTS = 4
MAX_TOKENS = 20


def make_told_config(num_engines: int, told: Path) -> EngineConfig:
    return make_named_config("told", str(told)).for_engine(0, num_engines)


read_engines = functools.partial(daemon_loads.read_engines, NAME)
wait_for = functools.partial(daemon_loads.wait_for_engines, NAME)


CAUSES = {
    "killed": "the engine did not start: worker (pid 1) was killed by SIGKILL",
    "short": "no memory just now",
    "missing": "model='missing': expected a folder",
}
FINAL = ("missing", "older")  # after a good start, too


class Client(threading.Thread):
    """Attaches and has requests computed, a round after the other, until it is finished."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.num_rounds = 0
        self.error: BaseException | None = None
        self._is_over = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            self.play()
        except BaseException as error:
            self.error = error

    def play(self) -> None:
        client = attach_client(NAME, "LLM")
        try:
            while not self._is_over.is_set():
                requests = make_requests(f"{self.name}-{self.num_rounds}", NUM_REQUESTS, MAX_TOKENS)
                client.add_requests(requests)
                assert_undisturbed(requests, collect(client, {one.request_id for one in requests}))
                self.num_rounds += 1
        finally:
            client.close()

    def wait_for_rounds(self, count: int) -> None:
        """Until so many more have ended. Raises what has ended this client."""
        count += self.num_rounds
        is_there = wait_until(lambda: self.num_rounds >= count or self.error is not None, TIMEOUT_S)
        if self.error is not None:
            raise self.error
        assert is_there, f"{type(self).__name__} is not served"

    def finish(self) -> None:
        """End it, after a round that has begun after this call."""
        self.wait_for_rounds(2)
        self._is_over.set()
        self.join(TIMEOUT_S)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error


def make_clients() -> list[Client]:
    return [Client(), Client()]


@dataclass
class Command:
    """A command to the daemon, in a thread of its own."""

    act: Callable[[], object]
    error: DaemonError | None = None
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.act()
        except DaemonError as error:
            self.error = error

    def wait(self) -> str:
        """What it was refused for; empty if it was done."""
        self.thread.join(TIMEOUT_S)
        assert not self.thread.is_alive(), "nobody is told what became of it"
        return "" if self.error is None else str(self.error)


class Stage:
    """Engine `index` in a stage of its life, and the command that has brought it there."""

    def __init__(self, name: str, num_engines: int, told: Path) -> None:
        self.name = name
        self.told = told
        self.index = num_engines - 1
        self.command: Command | None = None
        index = self.index
        match name:
            case "added" | "starting":
                self.index = num_engines
                told.write_text("unready")
                self.command = Command(lambda: add_engine(NAME, TIMEOUT_S))
                wait_for(lambda engines: num_engines in engines and engines[num_engines].pid)
            case "draining":
                self.command = Command(lambda: drain_engine(NAME, index, TIMEOUT_S))
            case "removed":
                self.command = Command(lambda: remove_engine(NAME, index, TIMEOUT_S))
            case "restarting":
                told.write_text("unready")
                self.command = Command(lambda: restart_engine(NAME, TIMEOUT_S, index))
                wait_for(lambda engines: engines[index].state == "restarting" and engines[index].pid)
            case _:
                assert name == "ready"
        if name in ("starting", "restarting"):
            socket = find_named(NAME) / read_engines()[self.index].socket
            assert wait_until(socket.exists, TIMEOUT_S)

    def strike(self, number: signal.Signals, then: str = "paced") -> None:
        """Kill or stop its core; the next one does `then`."""
        pid = getattr(read_engines().get(self.index), "pid", None)
        if pid is not None:  # else it is removed already
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        self.told.write_text(then)

    def fail_start(self, how: str) -> None:
        """Let the core that starts fail, and those in its place start well."""
        num_before = read_engines()[self.index].num_restarts
        if how == "older":  # which a core is from its start on
            self.strike(signal.SIGKILL, how)
        else:
            self.told.write_text(how)

        def has_failed(engines: dict[int, EngineState]) -> bool:
            if self.name != "restarting":
                return self.index not in engines
            engine = engines[self.index]
            return engine.state == "lost" or (how not in FINAL and engine.num_restarts > num_before)

        wait_for(has_failed)
        self.told.write_text("paced")


@pytest.fixture
def told(tmp_path: Path) -> Path:
    """What the next core that starts does."""
    file = tmp_path / "told"
    file.write_text("paced")
    return file


@contextlib.contextmanager
def under_clients(stage: Callable[[], Stage]) -> Generator[Stage]:
    """Clients that came before, and in the stage. Afterwards these and others are served."""
    before = make_clients()
    for client in before:
        client.wait_for_rounds(1)
    reached = stage()
    meanwhile = make_clients()
    yield reached
    wait_for(lambda engines: any(engine.state == "ready" for engine in engines.values()))
    for client in [*before, *meanwhile, *make_clients()]:
        client.finish()


@pytest.mark.parametrize(
    "how", ["short", *(pytest.param(how, marks=pytest.mark.slow) for how in ("missing", "killed"))]
)
def test_an_added_engine_that_does_not_start_is_the_rosters_alone(told: Path, how: str) -> None:
    with Daemon(NAME, make_told_config(2, told)):
        with under_clients(lambda: Stage("starting", 2, told)) as stage:
            stage.fail_start(how)
            assert stage.command is not None
            assert CAUSES[how] in stage.command.wait()
        assert list(read_engines()) == [0, 1]


def test_an_added_engine_that_speaks_another_version_is_the_rosters_alone(told: Path) -> None:
    with Daemon(NAME, make_told_config(1, told)):
        before = make_clients()
        told.write_text("older")
        with pytest.raises(DaemonError, match="engine 1 did not start: this engine speaks protocol version"):
            add_engine(NAME, TIMEOUT_S)
        for client in [*before, *make_clients()]:
            client.finish()


def test_an_added_engine_that_hangs_is_removed_and_who_added_it_is_told(told: Path) -> None:
    with (
        Daemon(NAME, make_told_config(1, told)),
        under_clients(lambda: Stage("starting", 1, told)) as stage,
    ):
        remove_engine(NAME, 1, TIMEOUT_S)
        assert stage.command is not None
        assert stage.command.wait() == "engine 1 was removed"


def test_clients_of_an_only_engine_whose_restart_fails_wait_for_the_next(told: Path) -> None:
    with (
        Daemon(NAME, make_told_config(1, told)) as daemon,
        under_clients(lambda: Stage("restarting", 1, told)) as stage,
    ):
        stage.fail_start("killed")
        daemon.wait_until_ready(2)


def test_a_client_that_knows_only_engines_that_are_gone_finds_the_others(
    told: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Daemon(NAME, make_told_config(2, told)):
        monkeypatch.setattr(
            blocking_client, "find_daemon_engines", lambda _: [DaemonEngine(NAME, 7, "core7.sock")]
        )
        with contextlib.closing(attach_client(NAME, "late")) as client:
            assert sorted(client.engines) == [0, 1]
            requests = make_requests("b", NUM_REQUESTS, MAX_TOKENS)
            client.add_requests(requests)
            assert_undisturbed(requests, collect(client, {request.request_id for request in requests}))


def test_a_client_that_has_missed_who_came_in_its_engines_place_goes_on_there(
    told: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does that was stopped for so long that its connection was closed."""
    with (
        Daemon(NAME, make_told_config(1, told)),
        contextlib.closing(attach_client(NAME, "missed")) as client,
    ):
        add_engine(NAME, TIMEOUT_S)
        remove_engine(NAME, 0, TIMEOUT_S)
        with monkeypatch.context() as patch:
            patch.setattr(EngineLinks, "_take_new_roster", lambda *_: None)
            assert wait_until(
                lambda: not client.get_outputs(timeout_s=0.1) and 0 not in client.engines, TIMEOUT_S
            )
        requests = make_requests("m", NUM_REQUESTS, MAX_TOKENS)
        client.add_requests(requests)
        assert_undisturbed(requests, collect(client, {request.request_id for request in requests}))
        assert sorted(client.engines) == [1]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("name", ["added", "starting", "ready", "draining", "removed", "restarting"])
@pytest.mark.parametrize("num_engines", [1, 2, 3])
def test_a_core_that_dies_or_hangs_costs_no_client_anything(
    told: Path, num_engines: int, name: str, number: signal.Signals
) -> None:
    if num_engines == 1 and name in ("draining", "removed"):
        pytest.skip("an only engine is neither drained nor removed")
    with Daemon(NAME, make_told_config(num_engines, told)):
        with under_clients(lambda: Stage(name, num_engines, told)) as stage:
            stage.strike(number)
            if stage.command is not None:
                assert not stage.command.wait()
        num_left = num_engines + (name in ("added", "starting")) - (name == "removed")
        wait_for(lambda engines: len(engines) == num_left)
        awaited = "drained" if name == "draining" else "ready"
        wait_for(lambda engines: stage.index not in engines or engines[stage.index].state == awaited)


@pytest.mark.slow
@pytest.mark.parametrize("how", [*CAUSES, "older"])
@pytest.mark.parametrize("name", ["added", "restarting"])
@pytest.mark.parametrize("num_engines", [2, 3])
def test_a_start_that_is_refused_costs_no_client_anything(
    told: Path, num_engines: int, name: str, how: str
) -> None:
    with Daemon(NAME, make_told_config(num_engines, told)):
        with under_clients(lambda: Stage(name, num_engines, told)) as stage:
            stage.fail_start(how)
            assert stage.command is not None
            refused = stage.command.wait()
            assert bool(refused) == (name == "added" or how in FINAL)
            assert not refused or CAUSES.get(how, "speaks protocol version") in refused
        lost = [engine.last_loss for engine in read_engines().values() if engine.state == "lost"]
        assert len(lost) == (name == "restarting" and how in FINAL)
        if lost:
            restart_engine(NAME, TIMEOUT_S, stage.index)
            for client in make_clients():
                client.finish()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "short"])
def test_clients_wait_while_every_engine_is_away_and_some_starts_fail(told: Path, how: str) -> None:
    with Daemon(NAME, make_told_config(2, told)):
        before = make_clients()
        for client in before:
            client.wait_for_rounds(1)
        told.write_text(how)
        for engine in read_engines().values():
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGKILL)
        wait_for(lambda engines: all(engine.num_restarts >= 2 for engine in engines.values()))
        meanwhile = make_clients()
        told.write_text("paced")
        for client in [*before, *meanwhile, *make_clients()]:
            client.finish()
