"""Attacks of those who share a daemon with others: a client of the network, and a server without keys.

'seen' and 'changed' are what neither may do: to be shown somebody else's request,
and to change what others get.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import random
import secrets
import time
from collections import Counter
from pathlib import Path
from typing import Any

import zmq

from ....ipc.errors import ProtocolError
from ....ipc.network.keys import read_client_keys
from ....ipc.params.request_options import RequestOptions
from ....ipc.params.sampling_params import SamplingParams
from ....ipc.protocol.codec import make_client_codec
from ....ipc.protocol.fair_share import MAX_CLIENT_WEIGHT
from ....ipc.protocol.messages import (
    PROTOCOL_VERSION,
    AbortRequests,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineRoster,
    Hello,
    ProtocolNotice,
    UtilityCall,
    UtilityMethod,
    UtilityResult,
    Welcome,
)
from ....ipc.protocol.token_ids import encode_token_ids
from ..noise import open_dealer
from .attack import REFUSALS, attack
from .plan import Target

_POLL_MS = 20
_NUM_UNANSWERED = 64  # of its own requests
_NUM_A_TICK = 100  # requests of a flood
_MAX_TOKENS = 16
_TIMEOUT_S = 5.0
_GUESSES = ("0", "1", "chatcmpl-0", "ordinary", "ordinary-streams")
_CALLS = (
    UtilityMethod.SNAPSHOT,
    UtilityMethod.STATS,
    UtilityMethod.RESET_PREFIX_CACHE,
    UtilityMethod.START_PROFILE,
    UtilityMethod.STOP_PROFILE,
    UtilityMethod.DIGEST,
)


@attack("network-client", {"answered", "refused", "unanswered", "told"})
def _lie_over_the_network(target: Target, rng: random.Random, until: float) -> Counter[str]:
    """A client with a key of its own that lies: weight, a tenant a request, attempts, age, aborts."""
    if not target.network_address:
        return Counter(unanswered=1)
    codec, answers, own, seen = make_client_codec(), Counter[str](), set[str](), set[str]()
    numbers, has_begun = itertools.count(1), False
    with open_dealer(target.network_address, read_client_keys(Path(target.network_keys))) as dealer:
        dealer.send_multipart(codec.encode(Hello(PROTOCOL_VERSION, "liar", os.getpid(), MAX_CLIENT_WEIGHT)))
        while time.monotonic() < until:
            if has_begun:
                number = next(numbers)
                said: list[Any] = [
                    UtilityCall(number, _CALLS[number % len(_CALLS)]),
                    AbortRequests([], [*_GUESSES, *seen]),
                    AbortRequests(list(seen), [], "ordinary-streams"),
                    EngineRoster([]),
                ]
                if len(own) < _NUM_UNANSWERED:
                    said.append(_make_lie(target, rng, own))
                with contextlib.suppress(zmq.Again):
                    for message in said:
                        dealer.send_multipart(codec.encode(message), zmq.NOBLOCK)
            while dealer.poll(_POLL_MS if not has_begun or len(own) >= _NUM_UNANSWERED else 1):
                with contextlib.suppress(ProtocolError):
                    message = codec.decode(dealer.recv_multipart())
                    has_begun = has_begun or isinstance(message, Welcome)
                    answers += _count_answer(message, own, seen)
    answers["unanswered"] = len(own)
    return answers


@attack("network-flood", {"answered", "refused", "unanswered", "told", "cut"})
def _flood_over_the_network(target: Target, rng: random.Random, until: float) -> Counter[str]:
    """One that sends requests, calls and aborts, as many as are taken; it is cut off, and comes again."""
    if not target.network_address:
        return Counter(unanswered=1)
    codec, answers, own, has_begun = make_client_codec(), Counter[str](), set[str](), False
    with (
        open_dealer(target.network_address, read_client_keys(Path(target.network_keys))) as dealer,
        contextlib.suppress(zmq.Again),  # it is not let in yet
    ):
        dealer.send_multipart(codec.encode(Hello(PROTOCOL_VERSION, "flood", os.getpid(), MAX_CLIENT_WEIGHT)))
        while time.monotonic() < until:
            with contextlib.suppress(zmq.Again):
                for _ in range(_NUM_A_TICK * has_begun):
                    lie = _make_lie(target, rng, own)
                    abort = AbortRequests([lie.request_id], [])
                    for message in (lie, UtilityCall(1, UtilityMethod.STATS), abort):
                        dealer.send_multipart(codec.encode(message), zmq.NOBLOCK)
            while dealer.poll(0 if has_begun else _POLL_MS) and time.monotonic() < until:
                message = codec.decode(dealer.recv_multipart())
                has_begun = has_begun or isinstance(message, Welcome)
                answers += _count_answer(message, own, set())
    answers["unanswered"] = len(own)
    return answers


def _make_lie(target: Target, rng: random.Random, own: set[str]) -> EngineCoreRequest:
    request_id = f"liar-{secrets.token_hex(8)}"
    own.add(request_id)
    prompt = [rng.randrange(1, 200) for _ in range(target.shrink(64))]
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=encode_token_ids(prompt),
        sampling_params=SamplingParams(max_tokens=_MAX_TOKENS, seed=1, ignore_eos=True),
        arrival_time=0.0,
        options=RequestOptions(priority=-(2**31), tenant=request_id, names=list(_GUESSES[:2])),
        is_resumed=True,
        num_attempts=5,
    )


def _count_answer(message: object, own: set[str], seen: set[str]) -> Counter[str]:
    match message:
        case EngineCoreOutputs(outputs=outputs):
            ended = {one.request_id for one in outputs if one.finish_reason is not None}
            own -= ended
            return Counter(answered=len(ended))
        case UtilityResult(snapshot=snapshot) if snapshot is not None:
            others = {one.request_id for one in snapshot.requests if not one.request_id.startswith("liar-")}
            seen |= others
            return Counter(seen=len(others)) if others else Counter(told=1)
        case UtilityResult(error=None) if message.stats is None and message.digest is None:
            return Counter(changed=1)
        case UtilityResult():
            return Counter(told=1) if message.error is None else Counter(refused=1)
        case ProtocolNotice():
            return Counter(refused=1)
        case _:
            return Counter()


@attack("keyless-neighbour", REFUSALS | {"200", "404"})
def _look_for_others(target: Target, _rng: random.Random, until: float) -> Counter[str]:
    """A caller of a server without keys, over the same daemon, who looks for others' requests to end them."""
    answers, seen = Counter[str](), set(_GUESSES)
    while target.keyless_port and time.monotonic() < until:
        address = (target.host, target.keyless_port)
        with contextlib.closing(http.client.HTTPConnection(*address, timeout=_TIMEOUT_S)) as connection:
            status, told = _ask(connection, "GET", "/stats")
            answers[status] += 1
            others = {one["request_id"] for one in told.get("requests", ())}
            answers["seen"] += len(others)
            seen |= others
            abort = {"request_ids": sorted(seen)[:64]}
            answers[_ask(connection, "POST", "/abort_requests", abort)[0]] += 1
            for name in sorted(seen)[:4]:
                answers[_ask(connection, "GET", f"/v1/responses/{name}")[0]] += 1
            status, told = _ask(connection, "GET", "/health")
            answers[status] += 1
            answers["seen"] += bool(told.get("request_id"))
    return +answers


def _ask(
    connection: http.client.HTTPConnection, method: str, path: str, body: object = None
) -> tuple[str, dict[str, Any]]:
    data = None if body is None else json.dumps(body)
    headers = {"content-type": "application/json", "x-forwarded-for": "127.0.0.1"}
    connection.request(method, path, data, headers)
    answer = connection.getresponse()
    text = answer.read()
    with contextlib.suppress(ValueError):
        told = json.loads(text)
        return str(answer.status), told if isinstance(told, dict) else {}
    return str(answer.status), {}
