"""Lets the tests beside it import the helpers of the server's tests, whose servers have a gRPC port here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "http"))

from openai_fakes import FakeLLM
from server_fakes import RunningServer, open_server, peer, running, server  # noqa: F401


@pytest.fixture
def llm(running: RunningServer) -> FakeLLM:  # noqa: F811
    return running.llm
