"""What a caller may say of a daemon on another machine, and why a connection to it is not made."""

from __future__ import annotations

import errno
import os
import shutil
import socket
from pathlib import Path

import msgspec
import pytest
import zmq
from frontend_fakes import make_facts
from quire import LLM, AsyncLLM
from quire.frontend.cli import main
from quire.frontend.client.handshake_watch import ConnectProbe, HandshakeWatch
from quire.frontend.client.remote_daemon import RemoteDaemon, RemoteEngine, choose_attachment
from quire.frontend.models.model_folder import POCKET, find_model_folder
from quire.ipc.errors import ConfigError, ModelError
from quire.ipc.network.keys import make_keys
from quire.ipc.network.served_files import hash_served_files
from quire.ipc.protocol.messages import RosterEntry
from refusals import Refusal, refusals

ADDRESS = "tcp://127.0.0.1:5757"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.mark.parametrize("cls", [LLM, AsyncLLM])
@refusals("attachments")
def test_what_does_not_fit_together_is_refused(cls: type, refusal: Refusal) -> None:
    refusal.check(lambda arguments: cls(**arguments))


def test_the_command_line_refuses_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["generate", "prompt"], ["top"], ["serve", "--port", "0"]):
        assert main([*command, "--attach", ADDRESS]) == 2
        assert "keys=None: expected a folder with client.secret" in capsys.readouterr().err
        assert main([*command, "--keys", "k"]) == 2
        assert "keys='k': only with attach=" in capsys.readouterr().err
    assert main(["daemon", "start", "--listen", "tcp://127.0.0.1:0"]) == 2
    assert "keys=None: expected the folder of its keys with listen" in capsys.readouterr().err


def test_a_host_that_is_not_known_leaves_no_descriptor_behind(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: object, **_kwargs: object) -> None:
        raise OSError("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ConfigError, match="an address whose host is known"):
        RemoteEngine(RemoteDaemon("tcp://some.host:5757", str(keys)))
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_the_pocket_model_is_the_copy_unless_another_is_given(keys: Path) -> None:
    chosen = choose_attachment(ADDRESS, keys)
    assert isinstance(chosen, RemoteDaemon)
    assert chosen.model == chosen.tokenizer == str(find_model_folder(POCKET))
    assert choose_attachment(ADDRESS, keys, looks_only=True) == RemoteDaemon(ADDRESS, str(keys))


def test_facts_name_the_copies_if_they_are_the_engines(keys: Path, tmp_path: Path) -> None:
    engine_folder = tmp_path / "engine"
    shutil.copytree(find_model_folder(POCKET), engine_folder, ignore=shutil.ignore_patterns("*.safetensors"))
    files = hash_served_files(str(engine_folder), str(engine_folder))
    facts = msgspec.structs.replace(make_facts(), model="remote", tokenizer="remote", files=files)
    chosen = choose_attachment(ADDRESS, keys)
    assert isinstance(chosen, RemoteDaemon)
    engine = RemoteEngine(chosen)
    seen = engine.check_facts(facts)
    engine.stop()
    assert seen.model == seen.tokenizer == str(find_model_folder(POCKET))
    (engine_folder / "tokenizer_config.json").write_text("{}")
    other = hash_served_files(str(engine_folder), str(engine_folder))
    with pytest.raises(ModelError, match=r"tokenizer_config\.json is sha256:\w{12} here and sha256:\w{12}"):
        engine.check_facts(msgspec.structs.replace(facts, files=other))


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def find_closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def wait_for_error(probe: ConnectProbe) -> int:
    """Of the attempt that is under way; on one machine it has ended at once."""
    while not (error := probe.ask()):
        pass
    probe.close()
    return error


def test_a_probe_says_why_nobody_is_reached() -> None:
    assert wait_for_error(ConnectProbe(f"tcp://127.0.0.1:{find_closed_port()}")) == errno.ECONNREFUSED
    with pytest.raises(ConfigError, match="an address whose host is known"):
        ConnectProbe("tcp://no-such-host.invalid:1")


def test_the_other_engines_of_a_host_are_found_without_a_name_server(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """They are connected to where nobody may wait, when an engine says that there are more."""
    first = HandshakeWatch("tcp://localhost:1", clock)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: pytest.fail("a name server was asked"))
    port = find_closed_port()
    sibling = first.make_sibling(f"tcp://localhost:{port}")
    assert wait_for_error(sibling._probe) == errno.ECONNREFUSED
    assert sibling._probe._place[1] == port
    sibling.close()


def test_an_engine_that_came_in_the_place_of_all_that_are_known_is_found_once(keys: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10.0)
        address = f"tcp://127.0.0.1:{listener.getsockname()[1] - 3}"
        handshakes = HandshakeWatch(address)
        engine = RemoteEngine(RemoteDaemon(address, str(keys)), handshakes=handshakes)
        try:
            assert engine.find_siblings() == []
            listener.accept()[0].close()
            assert RosterEntry(3, "") in engine.find_siblings()
            engine.find_siblings()
            assert RosterEntry(3, "") not in engine.find_siblings()
        finally:
            handshakes.close()
            engine.stop()


def test_a_port_at_which_nobody_listens_is_given_up_after_a_while(clock: Clock) -> None:
    watch = HandshakeWatch(f"tcp://127.0.0.1:{find_closed_port()}", clock)
    watch.note(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    for _ in range(10):
        watch.note(zmq.EVENT_CLOSED)
    assert watch.failure is None
    clock.now += 5.0
    watch.note(zmq.EVENT_CLOSED)
    assert watch.failure is not None
    assert "has no daemon: connection refused" in watch.failure
    watch.close()


def test_an_engine_that_is_restarted_is_waited_for(clock: Clock) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:  # as the supervisor holds it
        watch = HandshakeWatch(f"tcp://127.0.0.1:{held.getsockname()[1]}", clock)
        watch.note(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        for _ in range(100):
            clock.now += 1.0
            watch.note(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
            watch.note(zmq.EVENT_CLOSED)
        assert watch.failure is None
        watch.close()


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (zmq.EVENT_HANDSHAKE_FAILED_AUTH, "does not know this client"),
        (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, "is no Quire daemon's port"),
    ],
)
def test_what_cannot_change_ends_it_at_once(event: int, text: str) -> None:
    watch = HandshakeWatch(ADDRESS)
    watch.note(event)
    assert watch.failure is not None
    assert text in watch.failure


def test_one_handshake_that_is_broken_off_is_no_wrong_key(clock: Clock) -> None:
    watch = HandshakeWatch(ADDRESS, clock)
    for _ in range(4):
        watch.note(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
        clock.now += 1.0
    assert watch.failure is None
    watch.note(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
    assert watch.failure is not None
    assert "server.public is not its key" in watch.failure
