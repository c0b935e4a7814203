"""ZeroMQ's protocol by hand (ZMTP 3.0), for peers that no library would be."""

from __future__ import annotations

import socket

GREETING = b"\xff" + b"\x00" * 8 + b"\x7f\x03\x00NULL" + b"\x00" * 48
_READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"


def connect(path: str, timeout_s: float = 5.0) -> socket.socket:
    """A connection on which nothing was said."""
    raw = socket.socket(socket.AF_UNIX)
    raw.settimeout(timeout_s)
    raw.connect(path)
    return raw


def shake_hands(raw: socket.socket) -> None:
    """Become a peer."""
    raw.sendall(GREETING)
    receive_exactly(raw, len(GREETING))
    raw.sendall(bytes([4, len(_READY)]) + _READY)
    kind, size = receive_exactly(raw, 2)
    assert kind == 4
    receive_exactly(raw, size)


def receive_exactly(raw: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = raw.recv(size - len(data))
        assert part, "the connection was closed"
        data += part
    return data


def make_message(body: bytes) -> bytes:
    """A short message of one frame."""
    return bytes([0, len(body)]) + body
