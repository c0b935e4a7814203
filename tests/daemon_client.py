"""`daemon_client NAME PREFIX COUNT MAX_TOKENS [NUM_SENDS]`: a client process, to be killed.

Prints a line when it is attached and one when it has received tokens of every request; once all have ended,
one with the tokens of each, as JSON. With NUM_SENDS it kills itself when its requests move to another engine
and so many messages of that have left.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

from blocking_client import attach_client
from fakes import make_request
from quire.frontend.client.engine_connection import EngineSocket
from quire.frontend.client.engine_group import EngineGroup
from quire.ipc.protocol.messages import EngineCoreRequest
from quire.ipc.protocol.request_ledger import LedgerEntry

_LEAVE_S = 0.01  # in which what was sent leaves this process


def make_requests(prefix: str, count: int, max_tokens: int = 100) -> list[EngineCoreRequest]:
    """The requests of the client that is called `prefix`."""
    return [
        make_request(f"{prefix}-{i}", [ord(prefix[0]), i, 3], max_tokens=max_tokens + i % 7)
        for i in range(count)
    ]


def die_at_move(num_sends: int) -> None:
    """Have this process killed when requests have moved to another engine and so many messages have left."""
    place_again, send = EngineGroup._place_again, EngineSocket.send
    num_left: int | None = None

    def die_if_due() -> None:
        if num_left == 0:
            threading.Event().wait(_LEAVE_S)
            os.kill(os.getpid(), signal.SIGKILL)

    def move(group: EngineGroup, entries: list[LedgerEntry], now: float) -> None:
        nonlocal num_left
        place_again(group, entries, now)
        num_left = num_sends
        die_if_due()

    def send_and_count(socket: EngineSocket, frames: tuple[bytes]) -> bool:
        nonlocal num_left
        is_sent = send(socket, frames)
        if num_left is not None:
            num_left -= is_sent
            die_if_due()
        return is_sent

    EngineGroup._place_again = move  # type: ignore[method-assign]
    EngineSocket.send = send_and_count  # type: ignore[method-assign]


def main() -> None:
    name, prefix = sys.argv[1:3]
    count, max_tokens, *num_sends = map(int, sys.argv[3:])
    for number in num_sends:
        die_at_move(number)
    client = attach_client(name, "script")
    print("attached", flush=True)
    tokens: dict[str, list[int]] = {}
    for request in make_requests(prefix, count, max_tokens):
        client.add_request(request)
    num_live, is_busy = count, False
    while num_live:
        for output in client.get_outputs():
            own = tokens.setdefault(output.request_id, [])
            own += output.new_token_ids[len(own) - output.start :]
            num_live -= output.finish_reason is not None
        if not is_busy and len(tokens) == count:
            is_busy = True
            print("busy", flush=True)
    print(json.dumps(tokens), flush=True)
    client.close()
