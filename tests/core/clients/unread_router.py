"""Has a router read nothing while a peer sends a lot and leaves: `unread_router.py ADDRESS`.

A process of its own, which libzmq may abort.
"""

from __future__ import annotations

import sys

import zmq
from quire.ipc.protocol.sockets import bind_router
from zmtp import connect, make_message, shake_hands

_NUM_MESSAGES = 265_000
_TIMEOUT_S = 10.0


def main() -> None:
    """Ends when the heartbeats of all connections are over."""
    address = sys.argv[1]
    router = bind_router(zmq.Context(), address)
    silent, sender = (connect(address.removeprefix("ipc://"), _TIMEOUT_S) for _ in range(2))
    for raw in (silent, sender):
        shake_hands(raw)
    sender.sendall(make_message(b"x") * _NUM_MESSAGES)
    sender.close()
    while silent.recv(4096):
        pass  # heartbeats, the last of which it is given up for
    router.close(linger=0)
    router.context.term()


if __name__ == "__main__":
    main()
