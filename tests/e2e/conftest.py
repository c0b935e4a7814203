"""A server for all tests that only want one: with the pocket model and an API key."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from served import Served

API_KEY = "sk-shared"


@pytest.fixture(scope="package")
def shared_server() -> Iterator[Served]:
    server = Served(env={"QUIRE_API_KEY": API_KEY}, api_key=API_KEY)
    yield server
    server.wait_until_idle()
    assert server.stop() == 0
