"""Where a client may send its API key, and what is no key."""

from __future__ import annotations

import base64

import pytest
from quire.frontend.http.connections.auth import ApiKeys, hash_key
from server_fakes import Peer

KEYS = ApiKeys([hash_key("one"), hash_key("two")])
PASSWORD = b"Basic " + base64.b64encode(b"me:one")


@pytest.mark.parametrize(
    "headers",
    [
        [(b"authorization", b"Bearer one")],
        [(b"authorization", b"bearer  one ")],
        [(b"authorization", PASSWORD)],
        [(b"x-api-key", b"one")],
        [(b"api-key", b" one ")],
        [(b"authorization", b"Bearer none"), (b"api-key", b"one")],  # a client library's own stands there too
        [(b"api-key", b"wrong"), (b"x-api-key", b"one")],
    ],
)
def test_a_key_may_come_in_each_of_the_headers(headers: list[tuple[bytes, bytes]]) -> None:
    caller = KEYS.identify(headers)
    assert caller is not None
    assert caller.key_hash == hash_key("one")


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"api-key", b"")],
        [(b"api-key", b"Bearer one")],
        [(b"api-key", b"wrong"), (b"api-key", b"one")],  # the first counts: no list of guesses in a request
        [(b"authorization", b"one")],
        [(b"apikey", b"one")],
        [(b"api-key", hash_key("one").encode())],
    ],
)
def test_what_is_no_key_lets_nobody_in(headers: list[tuple[bytes, bytes]]) -> None:
    assert KEYS.identify(headers) is None


@pytest.mark.server(api_keys=("one",))
async def test_a_server_answers_who_sends_its_key_as_azure_does(peer: Peer) -> None:
    await peer.post("/v1/completions", {"prompt": "a"}, "api-key: one\r\n")
    assert (await peer.read_answer())[0] == 200
    await peer.post("/v1/completions", {"prompt": "a"}, "api-key: no\r\n")
    status, _, text = await peer.read_answer()
    assert status == 401
    assert "'api-key: KEY'" in text
