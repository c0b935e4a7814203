"""Attacks on the gRPC port by callers without a key: silent connections, and calls with large messages.

'not served': the server has no gRPC port.
"""

from __future__ import annotations

import random
import socket
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

from .attack import attack, sleep_until
from .plan import Target

_NOT_SERVED = "not served"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)  # and empty settings
_CONNECT_TIMEOUT_S = 1.0
_METHODS = ("quire.grpc.engine.QuireEngine/Generate", "grpc.health.v1.Health/Check")
_MESSAGE = b"a" * 3_000_000
_NUM_CALLERS = 8
_CODES = {
    "OK", "UNAUTHENTICATED", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "CANCELLED", "DEADLINE_EXCEEDED",
}  # fmt: skip


@attack("grpc-connections", {"connected", "refused", _NOT_SERVED})
def _open_connections(target: Target, _rng: random.Random, until: float) -> Counter[str]:
    """Connections without number, half of which have begun to speak HTTP/2."""
    if not target.grpc_address:
        return Counter({_NOT_SERVED: 1})
    host, _, port = target.grpc_address.rpartition(":")
    answers: Counter[str] = Counter()
    with ExitStack() as stack:
        for number in range(target.shrink(2500)):
            if time.monotonic() >= until:
                break
            try:
                connection = socket.create_connection((host, int(port)), _CONNECT_TIMEOUT_S)
                stack.callback(connection.close)
                if number % 2:
                    connection.sendall(_PREFACE)
                answers["connected"] += 1
            except OSError:
                answers["refused"] += 1
        sleep_until(until)
    return answers


@attack("grpc-strangers", _CODES | {_NOT_SERVED})
def _call_without_a_key(target: Target, _rng: random.Random, until: float) -> Counter[str]:
    """As many calls as one connection has, each with a message that is near the largest."""
    if not target.grpc_address:
        return Counter({_NOT_SERVED: 1})
    with ThreadPoolExecutor(_NUM_CALLERS) as callers:
        each = callers.map(lambda _: _call(target, until), range(_NUM_CALLERS))
        return sum(each, Counter[str]())


def _call(target: Target, until: float) -> Counter[str]:
    import grpc  # which is an extra

    answers: Counter[str] = Counter()
    with grpc.insecure_channel(target.grpc_address) as channel:
        calls = [
            channel.stream_stream(f"/{method}")(iter([_MESSAGE]), timeout=max(0.1, until - time.monotonic()))
            for method in _METHODS
            for _ in range(target.shrink(20))
        ]
        for call in calls:
            with suppress(grpc.RpcError):
                next(iter(call), None)
                call.cancel()
            answers[call.code().name] += 1
    return answers
