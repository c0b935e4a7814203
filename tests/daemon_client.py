"""`python daemon_client.py NAME PREFIX COUNT MAX_TOKENS`: a client process, to be killed or stopped.

Prints a line when it is attached and one when it has received tokens of every request; once all have ended,
one with the tokens of each, as JSON.
"""

from __future__ import annotations

import json
import sys

from fakes import make_request
from quire.frontend.client.engine_core_client import attach_sync_client
from quire.ipc.messages import EngineCoreRequest


def make_requests(prefix: str, count: int, max_tokens: int) -> list[EngineCoreRequest]:
    """The requests of the client that is called `prefix`."""
    return [
        make_request(f"{prefix}-{i}", [ord(prefix[0]), i, 3], max_tokens=max_tokens + i % 7)
        for i in range(count)
    ]


def main(name: str, prefix: str, count: int, max_tokens: int) -> None:
    client = attach_sync_client(name, "script")
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


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
