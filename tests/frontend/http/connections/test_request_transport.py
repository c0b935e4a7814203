"""The transport that a request with a body answers through."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from quire.frontend.http.connections.protocol import _RequestTransport


class _Written:
    """A transport that notes each call of its own."""

    def __init__(self) -> None:
        self.calls: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.calls.append(data)

    def writelines(self, pieces: tuple[bytes, ...]) -> None:
        self.calls.append(b"".join(pieces))

    def is_closing(self) -> bool:
        return False


class _Cycle:
    response_started = False


def _make(holds_head: bool) -> tuple[_RequestTransport, _Written, _Cycle]:
    written, cycle = _Written(), _Cycle()
    protocol: Any = SimpleNamespace(transport=written, close_after_answer=lambda: None)
    cycle_: Any = cycle
    return _RequestTransport(protocol, cycle_, holds_head), written, cycle


@pytest.mark.parametrize("body", [b"{}", b""])
def test_an_answers_head_goes_with_the_first_bytes_of_its_body(body: bytes) -> None:
    transport, written, cycle = _make(holds_head=True)
    transport.write(b"continue")
    cycle.response_started = True
    transport.write(b"head")
    assert written.calls == [b"continue"]
    transport.write(body)
    transport.write(b"more")
    assert written.calls == [b"continue", b"head" + body, b"more"]


def test_the_head_of_an_answer_that_may_have_no_body_waits_for_nothing() -> None:
    transport, written, cycle = _make(holds_head=False)
    cycle.response_started = True
    transport.write(b"head")
    assert written.calls == [b"head"]
