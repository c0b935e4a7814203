"""The thread that watches a core's socket: what it tells, and that it ends."""

from __future__ import annotations

import contextlib
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from daemons import fake_modules, runtime_folders
from quire.core.clients.listener import Listener
from quire.core.clients.origin import to_remote_identity
from quire.ipc.network.keys import KEY_LENGTH
from quire.ipc.protocol.sockets import bind_router

TIMEOUT_S = 20.0


@pytest.fixture
def router() -> Iterator[zmq.Socket[bytes]]:
    with runtime_folders() as folder, zmq.Context() as context:
        yield bind_router(context, f"ipc://{folder}/core.sock")
        context.destroy(linger=0)


def test_it_tells_of_lost_connections_and_its_thread_ends_with_it(router: zmq.Socket[bytes]) -> None:
    address = router.getsockopt_string(zmq.LAST_ENDPOINT)
    listener = Listener(router, address)
    assert not listener.has_lost_one()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address.removeprefix("ipc://"))
        connection.recv(1)  # of libzmq's greeting: it was accepted
    assert select.select([listener.lost_fd], [], [], TIMEOUT_S)[0]
    assert listener.has_lost_one()
    listener.stop()
    assert not listener._thread.is_alive()


def test_a_local_client_that_names_itself_a_remote_one_is_not_heard(router: zmq.Socket[bytes]) -> None:
    address = router.getsockopt_string(zmq.LAST_ENDPOINT)
    listener = Listener(router, address)
    with zmq.Context() as context, contextlib.ExitStack() as stack:
        for identity in (b"tcp:\xff", to_remote_identity(b"x", b"k" * KEY_LENGTH), b"honest"):
            client = stack.enter_context(context.socket(zmq.DEALER))
            client.setsockopt(zmq.IDENTITY, identity)
            client.connect(address)
            client.send(identity)
            assert router.poll(TIMEOUT_S * 1000)
            assert list(listener.receive()) == ([(identity, [identity])] if identity == b"honest" else [])
    listener.stop()


@pytest.mark.parametrize("what", ["restore", "stop"])
def test_neither_to_bind_again_nor_to_end_keeps_events_from_the_reader(what: str) -> None:
    with runtime_folders() as folder:
        script = Path(__file__).with_name("full_monitor.py")
        command = [sys.executable, script, f"ipc://{folder}/core.sock", what]
        subprocess.run(command, check=True, timeout=TIMEOUT_S)


def test_a_peer_that_leaves_much_unread_and_goes_ends_nobody() -> None:
    with runtime_folders() as folder, fake_modules():
        script = Path(__file__).with_name("unread_router.py")
        subprocess.run([sys.executable, script, f"ipc://{folder}/core.sock"], check=True, timeout=TIMEOUT_S)
