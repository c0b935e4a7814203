"""A server whose file descriptors run out: who comes then gets an answer, and afterwards all is as before."""

from __future__ import annotations

import contextlib
import resource
import socket
import subprocess
import sys
from pathlib import Path

from quire.frontend.http.limits import Limits
from quire.frontend.http.options import ServerOptions
from quire.frontend.http.server import fit_connections

MAX_OPEN_FILES = 100
TIMEOUT_S = 20.0


def ask(port: int) -> bytes:
    """The first bytes of an answer; b'' when the connection ends without one."""
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as connection:
        connection.sendall(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            return connection.recv(12)
    return b""


def test_silence_on_all_descriptors_leaves_others_an_answer_and_the_server_recovers() -> None:
    command = [sys.executable, str(Path(__file__).with_name("limited_server.py")), str(MAX_OPEN_FILES)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server, contextlib.ExitStack() as stack:
        stack.callback(server.kill)
        assert server.stdout is not None
        port = int(server.stdout.readline())
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), TIMEOUT_S))
            for _ in range(2 * MAX_OPEN_FILES)
        ]
        while not (answer := ask(port)):  # as long as refused ones have time to read why
            pass
        assert answer in (b"HTTP/1.1 200", b"HTTP/1.1 503")
        for connection in silent:
            connection.close()
        while ask(port) != b"HTTP/1.1 200":  # until it has seen their ends
            pass
        server.terminate()
        assert server.wait(TIMEOUT_S) == 0


def test_connections_are_no_more_than_descriptors_allow() -> None:
    options = ServerOptions(limits=Limits(max_connections=4096))
    assert fit_connections(options, 1024).limits.max_connections == 1024 - 192
    assert fit_connections(options, 10).limits.max_connections == 5
    assert fit_connections(options, 65536) is options
    assert fit_connections(options, resource.RLIM_INFINITY) is options
