"""Several HTTP processes on one socket: lost ones are replaced, within limits. These serve nothing."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from daemons import wait_until
from quire.frontend.http import group
from quire.frontend.http.group import EXIT_ENGINE_LOST, HttpGroup
from quire.frontend.http.options import ServerOptions
from quire.ipc.errors import EngineDeadError, EngineStartError
from quire.ipc.processes.process import catch_signals

CHILD = """
import os, signal, socket, sys
import msgspec
from quire.frontend.http.group import ALIVE, FAILED, PHASE, SERVES, HttpArgs
from quire.ipc.processes.process import Lifeline
lifeline = Lifeline()
lifeline.watch(0.0)
args = msgspec.msgpack.decode(lifeline.args, type=HttpArgs)
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
control = socket.socket(fileno=args.control_fd)
control.send(ALIVE + PHASE + b"load ..weights\\n" + ALIVE)
if args.attach == "broken engine":
    control.send(FAILED + b"model='x.y': ")
    control.send(b"a folder\\n")
    os._exit(1)
control.send(ALIVE + SERVES + b"tool calls: hermes\\n" + ALIVE)
if args.attach == "engine that fails":
    control.send(b"%load weights\\n#model='x.y': ")
    control.send(b"a folder\\n")
    os._exit(1)
assert not args.options.accepts_when_ready, "nobody else says that the engine is being loaded"
if args.attach == "lost engine":
    os._exit(EXIT_ENGINE_LOST)
while control.recv(64):
    control.send(ALIVE)
"""


@pytest.fixture(autouse=True)
def fake_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = CHILD.replace("EXIT_ENGINE_LOST", str(EXIT_ENGINE_LOST))
    (tmp_path / "fake_http.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(group, "HTTP_MODULE", "fake_http")


@pytest.fixture(autouse=True)
def own_signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`run` takes SIGTERM and SIGINT over for the rest of its process; they are given back here."""
    readers: list[socket.socket] = []

    def catch(*numbers: signal.Signals) -> socket.socket:
        readers.append(catch_signals(*numbers))
        return readers[-1]

    monkeypatch.setattr(group, "catch_signals", catch)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    os.close(signal.set_wakeup_fd(-1))
    for number, handler in handlers.items():
        signal.signal(number, handler)
    for reader in readers:
        reader.close()


@pytest.fixture
def listening_socket() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening_socket:
        yield listening_socket


def make_group(
    listening_socket: socket.socket, attach: str = "engine", max_http_restarts: int = 5
) -> HttpGroup:
    options = ServerOptions(max_http_restarts=max_http_restarts, drain_timeout_s=5.0)
    return HttpGroup(attach, options, listening_socket, 2)


def run_beside(http_group: HttpGroup, act: Callable[[], None]) -> int:
    """`run`, and `act` in a thread once all processes serve. Where that fails the group ends, too."""
    errors: list[BaseException] = []

    def act_or_end() -> None:
        try:
            act()
        except BaseException as error:
            errors.append(error)
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=act_or_end)
    try:
        return http_group.run(thread.start)
    finally:
        if thread.ident is not None:
            thread.join()
        if errors:
            raise errors[0]


def find_pids(http_group: HttpGroup) -> list[int | None]:
    """The processes that serve, by place."""
    return [
        process.child.process.pid if process.serves and process.child.process is not None else None
        for process in http_group._processes
    ]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_process_is_replaced_without_the_other_until_a_signal_ends_all(
    number: signal.Signals, listening_socket: socket.socket
) -> None:
    http_group = make_group(listening_socket)
    places: list[list[int | None]] = []
    waited: list[bool] = []

    def list_waiting() -> list[bool]:
        return [process._options.accepts_when_ready for process in http_group._processes]

    def act() -> None:
        assert http_group.formats == "tool calls: hermes"
        assert list_waiting() == [False, False]  # nobody else says that the engine is being loaded
        before = find_pids(http_group)
        assert before[0] is not None
        os.kill(before[0], number)
        wait_until(lambda: before[0] not in (now := find_pids(http_group)) and None not in now, 10.0)
        places.extend([before, find_pids(http_group)])
        waited.extend(list_waiting())
        os.kill(os.getpid(), signal.SIGTERM)

    assert run_beside(http_group, act) == 0
    before, after = places
    assert waited == [True, False]
    assert None not in after
    assert after[0] != before[0]
    assert after[1] == before[1]


def test_the_start_of_an_engine_is_told_and_why_it_fails(listening_socket: socket.socket) -> None:
    phases: list[str] = []
    http_group = HttpGroup("broken engine", ServerOptions(), listening_socket, 2, phases.append)
    with pytest.raises(EngineStartError, match=r"^model='x\.y': a folder$"):
        http_group.run(lambda: None)
    assert set(phases) <= {"load ..weights"}  # told by the first process, which may not be the first to fail


def test_processes_that_are_lost_too_often_end_the_group_with_the_cause(
    listening_socket: socket.socket,
) -> None:
    http_group = make_group(listening_socket, max_http_restarts=0)

    def kill_second() -> None:
        pid = find_pids(http_group)[1]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    with pytest.raises(EngineDeadError, match=r"http \(pid \d+\) was killed by SIGKILL, once in 60 s"):
        run_beside(http_group, kill_second)


def test_an_engine_that_is_gone_for_good_ends_the_group_at_once(listening_socket: socket.socket) -> None:
    with pytest.raises(EngineDeadError, match="the engine 'lost engine' has ended"):
        make_group(listening_socket, "lost engine").run(lambda: None)
