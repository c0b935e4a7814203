"""How much clients have sent that nobody has read, and who is cut for it. Without sockets."""

from __future__ import annotations

from quire.core.network.network_listener import UnreadBytes

ONE, OTHER = b"one", b"other"
KEYS = {1: ONE, 2: ONE, 3: OTHER}


def start(most: int = 1000) -> UnreadBytes:
    """With a first look, at which so much had come before."""
    unread = UnreadBytes(most, most)
    assert unread.look({1: 5000, 2: 5000, 3: 5000}, KEYS) == []
    return unread


def test_what_came_before_the_first_look_was_read() -> None:
    unread = start()
    assert unread.look({1: 5900, 2: 5000, 3: 5050}, KEYS) == []
    assert not unread.cut_off


def test_all_connections_of_who_sent_most_are_cut_and_no_others() -> None:
    unread = start()
    assert unread.look({1: 5500, 2: 5400, 3: 5600}, KEYS) == [1, 2]
    assert unread.cut_off == {ONE}
    assert unread.forget() == 1500
    assert not unread.cut_off
    assert unread.forget() == 0


def test_what_is_read_counts_no_more() -> None:
    unread = start()
    for _ in range(100):
        unread.note_read(ONE, [100])
        unread.note_read(ONE, [300])
    assert unread.look({1: 5000 + 100 * (135 + 342) + 1000, 2: 5000, 3: 5000}, KEYS) == []
    assert unread.look({1: 5000 + 100 * (135 + 342) + 1001, 2: 5000, 3: 5000}, KEYS) == [1, 2]


def test_what_came_over_a_connection_that_has_ended_still_counts() -> None:
    unread = start()
    for fd in range(10, 20):
        unread.begin(fd)
        unread.end(fd, 200, ONE)
    assert unread.look({3: 5100}, KEYS) == [], "none of its connections is left"
    assert unread.cut_off == {ONE}
    unread.begin(1)
    assert unread.look({1: 1, 3: 5100}, KEYS) == [1]


def test_who_has_said_nothing_yet_is_cut_for_what_unknown_ones_sent() -> None:
    unread = start()
    unread.begin(7)
    assert unread.look({3: 5100, 7: 2000}, KEYS) == [7]
    assert unread.cut_off == set()


def test_who_alone_sends_more_than_clients_do_is_cut_before_all_is_full() -> None:
    unread = UnreadBytes(10_000, most_each=500)
    assert unread.look({1: 0, 2: 0, 3: 0, 4: 0}, KEYS) == []
    assert unread.look({1: 1000, 2: 0, 3: 500, 4: 5000}, KEYS) == [4]  # two connections of the first
    assert unread.look({1: 1001, 2: 0, 3: 500}, KEYS) == [1, 2]
    assert unread.cut_off == {ONE}


def test_without_a_bound_nothing_is_counted() -> None:
    unread = UnreadBytes(None, 1)
    for count in (0, 1 << 40):
        assert unread.look({1: count}, KEYS) == []
