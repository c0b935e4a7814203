"""Fixtures of the command line's tests."""

from __future__ import annotations

import pytest
from chat_fakes import ChatUser


@pytest.fixture
def user(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> ChatUser:
    return ChatUser(monkeypatch, capsys)
