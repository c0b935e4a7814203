"""Addresses as users write them."""

from __future__ import annotations

import pytest
from quire.ipc.errors import ConfigError
from quire.ipc.network.tcp_address import (
    TcpAddress,
    check_listening,
    open_listener,
    parse_tcp_address,
    read_place,
)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("tcp://127.0.0.1:5757", "127.0.0.1", 5757),
        ("tcp://gpu-1.example:1", "gpu-1.example", 1),
        ("tcp://[::1]:65535", "::1", 65535),
    ],
)
def test_an_address_is_read_and_written_alike(text: str, host: str, port: int) -> None:
    address = parse_tcp_address("attach", text)
    assert address == TcpAddress(host, port)
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    [
        "tcp://127.0.0.1",
        "tcp://:5757",
        "tcp://::1:5757",
        "tcp://a:b:1",
        "tcp://me@host:1",
        "tcp://host/path:1",
        "tcp://host:0",
        "tcp://host:65536",
        "tcp://host:-1",
        "tcp://*:5757",
        "udp://host:1",
    ],
)
def test_what_is_no_address_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(ConfigError, match=r"attach=.*tcp://HOST:PORT"):
        parse_tcp_address("attach", text)


def test_any_free_port_is_only_for_who_listens() -> None:
    address = parse_tcp_address("listen", "tcp://127.0.0.1:0", is_listening=True)
    with open_listener(address) as listener:
        assert read_place(listener).port > 0
    assert address.shift(3).port == 0
    assert TcpAddress("host", 5757).shift(3) == TcpAddress("host", 5760)


def test_nobody_listens_without_keys_or_has_keys_for_nothing() -> None:
    assert check_listening(None, None) is None
    with pytest.raises(ConfigError, match="keys=None: expected the folder of its keys"):
        check_listening("tcp://127.0.0.1:0", None)
    with pytest.raises(ConfigError, match="keys='k': only with listen"):
        check_listening(None, "k")


def test_an_address_of_another_machine_cannot_be_listened_on() -> None:
    with pytest.raises(ConfigError, match="an address of this machine"):
        open_listener(TcpAddress("192.0.2.1", 5757))
