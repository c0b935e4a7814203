"""Attacks on the gRPC port by callers without a key: silent connections, and calls with large messages.

'not served': the server has no gRPC port.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress

from .attack import Attack

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)  # and empty settings
_CONNECT_TIMEOUT_S = 1.0
_METHODS = ("quire.grpc.engine.QuireEngine/Generate", "grpc.health.v1.Health/Check")
_MESSAGE = b"a" * 3_000_000
_NUM_CALLERS = 8


class GrpcConnections(Attack):
    """Connections without number, half of which have begun to speak HTTP/2."""

    allowed = frozenset({"connected", "refused", "not served"})

    def play(self, until: float) -> Counter[str]:
        if not self.target.grpc_address:
            return Counter({"not served": 1})
        host, _, port = self.target.grpc_address.rpartition(":")
        answers: Counter[str] = Counter()
        with ExitStack() as stack:
            for number in range(self.target.shrink(2500)):
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
            time.sleep(max(0.0, until - time.monotonic()))
        return answers


class GrpcStrangers(Attack):
    """Calls without a key, as many as one connection has, each with a message that is near the largest."""

    allowed = frozenset(
        {
            "OK",
            "UNAUTHENTICATED",
            "RESOURCE_EXHAUSTED",
            "UNAVAILABLE",
            "CANCELLED",
            "DEADLINE_EXCEEDED",
            "not served",
        }
    )

    def play(self, until: float) -> Counter[str]:
        if not self.target.grpc_address:
            return Counter({"not served": 1})
        answers: Counter[str] = Counter()
        callers = [threading.Thread(target=self._call, args=(until, answers)) for _ in range(_NUM_CALLERS)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        return answers

    def _call(self, until: float, answers: Counter[str]) -> None:
        import grpc  # which is an extra

        with grpc.insecure_channel(self.target.grpc_address) as channel:
            calls = [
                channel.stream_stream(f"/{method}")(
                    iter([_MESSAGE]), timeout=max(0.1, until - time.monotonic())
                )
                for method in _METHODS
                for _ in range(self.target.shrink(20))
            ]
            for call in calls:
                with suppress(grpc.RpcError):
                    next(iter(call), None)
                    call.cancel()
                answers[call.code().name] += 1
