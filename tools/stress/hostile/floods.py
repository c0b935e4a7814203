"""Attacks by rate: each request is small and right, and there are more of them than anybody needs."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import secrets
import socket
import time
from collections import Counter, deque
from pathlib import Path

import msgspec
import zmq

from ....ipc.errors import ProtocolError
from ....ipc.network.keys import read_client_keys
from ....ipc.params.sampling_params import SamplingParams
from ....ipc.protocol.codec import make_client_codec
from ....ipc.protocol.messages import (
    PROTOCOL_VERSION,
    AbortRequests,
    EngineCoreOutputs,
    EngineCoreRequest,
    Hello,
    UtilityCall,
    UtilityMethod,
    Welcome,
)
from ....ipc.protocol.token_ids import encode_token_ids
from ..noise import open_dealer
from .attack import REFUSALS, UNANSWERED, attack
from .plan import Target
from .wire import Exchange, connect, converse, make_request

_CONNECTIONS_A_S = 2000
_TICK_S = 0.01
_NUM_OPEN = 200  # of them; then the oldest is closed, answered or not
_NUM_READERS = 200
_NUM_PIPELINED = 400
_REQUESTS_A_PIECE = 20
_MESSAGES_A_TICK = 100  # of a client of the network


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


@attack("network-flood", {"sent", "answered", "cut"})
def _flood_over_the_network(target: Target, rng: random.Random, until: float) -> Counter[str]:
    """A client of the network that sends requests, calls and aborts, as many as are taken."""
    answers: Counter[str] = Counter()
    if not target.network_address:
        return answers
    codec, has_begun = make_client_codec(), False
    with open_dealer(target.network_address, read_client_keys(Path(target.network_keys))) as dealer:
        try:
            dealer.send_multipart(codec.encode(Hello(PROTOCOL_VERSION, "flood", os.getpid(), 1)))
        except zmq.Again:  # it was cut off, and what it has sent is not read yet
            return Counter(cut=1)
        while time.monotonic() < until:
            with contextlib.suppress(zmq.Again):
                for number in range(_MESSAGES_A_TICK if has_begun else 0):
                    request = EngineCoreRequest(
                        request_id=f"flood-{secrets.token_hex(8)}",
                        prompt_token_ids=encode_token_ids([rng.randrange(1, 200) for _ in range(8)]),
                        sampling_params=SamplingParams(max_tokens=1),
                        arrival_time=time.time(),
                    )
                    for message in (
                        request,
                        UtilityCall(number + 1, UtilityMethod.STATS),
                        AbortRequests([request.request_id], []),
                    ):
                        dealer.send_multipart(codec.encode(message), zmq.NOBLOCK)
                    answers["sent"] += 1
            while dealer.poll(0 if has_begun else 20) and time.monotonic() < until:
                with contextlib.suppress(ProtocolError):
                    message = codec.decode(dealer.recv_multipart())
                    has_begun = has_begun or isinstance(message, Welcome)
                    answers["answered"] += isinstance(message, EngineCoreOutputs)
    return answers
