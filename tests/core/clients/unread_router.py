"""Has a router read nothing while a peer sends a lot and leaves: `unread_router.py ADDRESS`.

A process of its own, which libzmq may abort.
"""

from __future__ import annotations

import socket
import sys

import zmq
from quire.ipc.protocol.sockets import bind_router

_GREETING = b"\xff" + b"\x00" * 8 + b"\x7f\x03\x00NULL" + b"\x00" * 48  # ZMTP 3.0, 64 bytes
_READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
_MESSAGE = b"\x00\x01x"
_NUM_MESSAGES = 265_000
_TIMEOUT_S = 10.0


def main() -> None:
    """Ends when the heartbeats of all connections are over."""
    address = sys.argv[1]
    router = bind_router(zmq.Context(), address)
    silent, sender = (_connect(address.removeprefix("ipc://")) for _ in range(2))
    sender.sendall(_MESSAGE * _NUM_MESSAGES)
    sender.close()
    while silent.recv(4096):
        pass  # heartbeats, the last of which it is given up for
    router.close(linger=0)
    router.context.term()


def _connect(path: str) -> socket.socket:
    raw = socket.socket(socket.AF_UNIX)
    raw.settimeout(_TIMEOUT_S)
    raw.connect(path)
    raw.sendall(_GREETING)
    _receive(raw, len(_GREETING))
    raw.sendall(bytes([4, len(_READY)]) + _READY)
    _receive(raw, _receive(raw, 2)[1])
    return raw


def _receive(raw: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += raw.recv(size - len(data))
    return data


if __name__ == "__main__":
    main()
