"""How much a client of the network sends ahead of its engine's reading. Without sockets."""

from __future__ import annotations

from quire.ipc.protocol.codec import make_client_codec
from quire.ipc.protocol.messages import UtilityCall, UtilityMethod
from quire.ipc.protocol.send_window import MAX_UNREAD_BYTES, PING_BYTES, SendWindow

CODEC = make_client_codec()


def send(window: SendWindow, num_bytes: int) -> int | None:
    """A message, before it the PING that is due: its id."""
    ping = window.make_ping()
    call_id = None
    if ping is not None:
        call = CODEC.decode(list(ping))
        assert isinstance(call, UtilityCall)
        assert call.method is UtilityMethod.PING
        call_id = call.call_id
        window.note_ping()
    window.note_sent(num_bytes)
    return call_id


def fill(window: SendWindow) -> list[int]:
    """Send until it is full; the ids of the PINGs."""
    pings: list[int] = []
    while not window.is_full:
        if (call_id := send(window, PING_BYTES)) is not None:
            pings.append(call_id)
    return pings


def test_who_sends_little_never_asks() -> None:
    window = SendWindow()
    assert [send(window, 100) for _ in range(1000)] == [None] * 1000
    assert not window.is_full


def test_a_full_window_opens_with_each_answer() -> None:
    window = SendWindow()
    pings = fill(window)
    assert len(pings) == len(set(pings)) == MAX_UNREAD_BYTES // PING_BYTES
    assert all(call_id < 0 for call_id in pings), "others have ids from 0 on"
    window.note_answer(5)
    assert window.is_full
    window.note_answer(pings[0])
    assert not window.is_full
    assert len(fill(window)) == 1


def test_an_answer_says_that_all_before_is_read() -> None:
    window = SendWindow()
    pings = fill(window)
    window.note_answer(pings[-2])
    assert len(fill(window)) == len(pings) - 1
    window.note_answer(pings[0])
    assert window.is_full, "that answer counted before"


def test_a_message_of_any_size_may_be_sent_when_all_is_read() -> None:
    window = SendWindow()
    assert send(window, 10 * MAX_UNREAD_BYTES) is None
    assert not window.is_full
    call_id = send(window, 1)
    assert call_id is not None
    assert window.is_full
    window.note_answer(call_id)
    assert not window.is_full


def test_a_new_connection_has_nothing_unread() -> None:
    window = SendWindow()
    pings = fill(window)
    window.reset()
    assert not window.is_full
    assert not set(fill(window)) & set(pings), "an answer to an old one would say too much"
