"""Where a client may send its API key, and what is no key."""

from __future__ import annotations

import base64

import pytest
from quire.frontend.http.connections.auth import OPEN_PATHS, ApiKeys, hash_key

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


def test_the_page_comes_without_a_key_and_asks_for_it_itself_but_what_it_shows_does_not() -> None:
    assert "/" in OPEN_PATHS
    assert not OPEN_PATHS & {"/stats", "/stats/stream", "/v1/models", "/v1/responses"}
