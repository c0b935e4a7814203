"""A daemon's key files are replaced or removed while clients of the network are at work."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from blocking_client import BlockingClient, attach_client
from daemon_loads import PACED, TIMEOUT_S, ask, collect_some, finish, make_requests
from daemons import Daemon, fake_modules, runtime_folders, wait_until
from quire.frontend.client.remote_daemon import RemoteDaemon
from quire.frontend.daemon import restart_engine
from quire.ipc.errors import EngineDeadError, EngineStartError
from quire.ipc.network.keys import CLIENTS, SERVER_PUBLIC, SERVER_SECRET, make_keys


@pytest.fixture(scope="module", autouse=True)
def fakes() -> Iterator[None]:
    with runtime_folders(), fake_modules():
        yield


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    shutil.copytree(tmp_path / "keys", tmp_path / "copy")  # of a client's machine
    return tmp_path / "keys"


@pytest.fixture
def copy(keys: Path) -> Path:
    return keys.with_name("copy")


@pytest.fixture
def daemon(keys: Path) -> Iterator[Daemon]:
    with Daemon("net", PACED, listen="tcp://127.0.0.1:0", keys=str(keys)) as daemon:
        yield daemon


def attach(daemon: Daemon, keys: Path) -> contextlib.closing[BlockingClient]:
    return contextlib.closing(attach_client(RemoteDaemon(daemon.listen, str(keys)), "test", TIMEOUT_S))


def replace(keys: Path) -> None:
    public, secret = zmq.curve_keypair()
    (keys / SERVER_SECRET).write_bytes(secret)
    (keys / SERVER_PUBLIC).write_bytes(public)


def remove(keys: Path) -> None:
    (keys / SERVER_SECRET).unlink()


def spoil(keys: Path) -> None:
    (keys / SERVER_SECRET).write_bytes(b"half of a k")


@pytest.mark.parametrize(
    "change", [spoil, *(pytest.param(one, marks=pytest.mark.slow) for one in (replace, remove))]
)
def test_other_files_cost_nobody_a_token_though_the_core_is_killed_then(
    daemon: Daemon, keys: Path, copy: Path, change: object
) -> None:
    assert callable(change)
    with attach(daemon, copy) as client:
        requests = make_requests("runs", 4, 150)
        client.add_requests(requests)
        outputs = collect_some(client)
        change(keys)
        with attach(daemon, copy) as late:
            ask(late, "newcomer")
        os.kill(daemon.core_pid, signal.SIGKILL)
        finish(client, requests, outputs)
        with attach(daemon, copy) as later:
            ask(later, "after")


def test_another_key_counts_from_a_restart_and_one_that_cannot_be_used_never(
    daemon: Daemon, keys: Path, copy: Path
) -> None:
    spoil(keys)
    restart_engine(daemon.name, TIMEOUT_S)
    with attach(daemon, copy) as client:
        ask(client, "old")
    replace(keys)
    with pytest.raises(EngineStartError, match=r"server\.public is not its key"):
        attach(daemon, keys)
    restart_engine(daemon.name, TIMEOUT_S)
    with attach(daemon, keys) as client:
        ask(client, "new")
    with pytest.raises(EngineStartError, match=r"server\.public is not its key"):
        attach(daemon, copy)


def test_without_its_file_no_client_is_let_in_and_with_it_again_all_are(
    daemon: Daemon, keys: Path, copy: Path
) -> None:
    (keys / CLIENTS).rename(keys / "away")
    with pytest.raises(EngineStartError, match="does not know this client"):
        attach(daemon, copy)
    num_restarts = daemon.num_restarts
    os.kill(daemon.core_pid, signal.SIGKILL)
    assert wait_until(lambda: daemon.num_restarts > num_restarts, TIMEOUT_S)
    daemon.wait_until_ready(num_restarts + 1)
    with contextlib.closing(attach_client(daemon.name, "test")) as here:
        ask(here, "here")
    (keys / "away").rename(keys / CLIENTS)
    with attach(daemon, copy) as client:
        ask(client, "back")
        (keys / CLIENTS).unlink()
        with pytest.raises(EngineDeadError, match="does not know this client"):
            ask(client, "cut")
