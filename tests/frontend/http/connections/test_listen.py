"""Which addresses are this machine's own, and who may listen beside whom."""

from __future__ import annotations

import os

import pytest
from quire.frontend.http.connections.listen import bind_socket, is_loopback, reserve_port
from quire.ipc.errors import ConfigError


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("127.8.9.10", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("::ffff:10.0.0.1", False),
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
        ("10.0.0.1", False),
        ("127.evil.example", False),
        ("localhost.evil.example", False),
    ],
)
def test_only_loopback_addresses_are_reached_from_this_machine_only(host: str, is_own: bool) -> None:
    assert is_loopback(host) is is_own


def test_a_port_is_shared_only_when_asked_for() -> None:
    with bind_socket("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(
            ConfigError, match=f"port={port}: expected a free port; this one is in use by pid {os.getpid()} "
        ):
            bind_socket("127.0.0.1", port)
        with bind_socket("127.0.0.1", port, share_port=True) as second:
            assert second.getsockname() == first.getsockname()


def test_a_reserved_port_is_given_to_nobody_who_does_not_share_it() -> None:
    with reserve_port("grpc_port", "127.0.0.1", 0) as reserved:
        port = reserved.getsockname()[1]
        with pytest.raises(ConfigError, match=f"grpc_port={port}: expected a free port"):
            reserve_port("grpc_port", "127.0.0.1", port)
        with bind_socket("127.0.0.1", port, share_port=True) as listening:
            assert listening.getsockname() == reserved.getsockname()
        with pytest.raises(ConfigError):
            bind_socket("127.0.0.1", port)
