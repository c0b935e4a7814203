"""A server for all tests that only want one: with the pocket model, which embeds too, and a key."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemons import fake_modules
from fake_process import MODULE
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


@pytest.fixture
def fake_worker() -> Iterator[None]:
    """A test's engines and daemons have worker processes that need no torch (fake_process.py)."""
    with fake_modules(MODULE):
        yield
