"""The ports of several engines: which of them refuse who comes."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
from quire.core.supervision.network_ports import NetworkPorts
from quire.ipc.errors import ConfigError
from quire.ipc.network.keys import make_keys
from quire.ipc.network.tcp_address import TcpAddress, open_listener


def test_the_port_of_a_lost_engine_refuses_until_it_is_started_again(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    ports = NetworkPorts("tcp://127.0.0.1:0", str(tmp_path / "keys"), num_engines=2)
    places = [ports.address, ports.address.shift(1)]
    try:
        with socket.socket(fileno=socket.dup(ports.open(1).listening_fd)) as held:  # as a core holds it
            for _ in range(2):
                ports.refuse_at({1})
                socket.create_connection((places[0].host, places[0].port)).close()
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection((places[1].host, places[1].port))
            ports.refuse_at(set())
            with socket.create_connection((places[1].host, places[1].port)) as client:
                held.setblocking(True)
                accepted, _ = held.accept()
                with accepted:
                    client.sendall(b"x")
                    assert accepted.recv(1) == b"x"
    finally:
        ports.close()


def test_a_port_beyond_the_last_is_refused_and_no_other_taken() -> None:
    with pytest.raises(
        ConfigError, match=re.escape("listen='tcp://127.0.0.1:65536': expected a port up to 65535")
    ):
        open_listener(TcpAddress("127.0.0.1", 65535).shift(1))
