"""A server for all tests that only want one: with the pocket model, which embeds too, and a key."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import Served

sys.path.insert(0, str(Path(__file__).parents[1] / "frontend"))

API_KEY = "sk-shared"


@pytest.fixture(scope="package")
def shared_server() -> Iterator[Served]:
    options = ("--runner", "generate", "--convert", "embed", "--enable-tokenizer-info-endpoint")
    server = Served(*options, env={"QUIRE_API_KEY": API_KEY}, api_key=API_KEY)
    yield server
    server.wait_until_idle()
    assert server.stop() == 0
