"""Which connection of the network is cut when there are more than there may be."""

from __future__ import annotations

from quire.core.network.network_listener import ConnectionLimits


def test_the_oldest_of_the_address_with_most_is_cut() -> None:
    limits = ConnectionLimits(max_connections=100, max_waiting=3)
    assert [limits.accept(1, "honest"), limits.accept(2, "crowd"), limits.accept(3, "crowd")] == [None] * 3
    assert limits.accept(4, "crowd") == 2
    assert limits.accept(5, "crowd") == 3


def test_clients_are_not_cut_and_do_not_wait() -> None:
    limits = ConnectionLimits(max_connections=100, max_waiting=1)
    for fd in range(50):
        assert limits.accept(fd, "one") is None
        limits.note_client(fd)
    assert limits.accept(50, "one") is None
    assert limits.accept(51, "one") == 50


def test_with_as_many_clients_as_there_may_be_one_may_wait() -> None:
    limits = ConnectionLimits(max_connections=3, max_waiting=10)
    for fd in (1, 2):
        limits.accept(fd, "one")
        assert limits.note_client(fd) is None
    assert limits.accept(3, "two") is None
    assert limits.accept(4, "two") == 3
    assert limits.end(1)
    assert limits.accept(5, "two") is None


def test_only_the_end_of_a_client_is_news() -> None:
    limits = ConnectionLimits(max_connections=10, max_waiting=10)
    limits.accept(1, "one")
    limits.accept(2, "one")
    limits.note_client(2)
    assert [limits.end(1), limits.end(2), limits.end(2), limits.end(9)] == [False, True, False, False]


def test_a_number_that_is_used_again_is_another_connection() -> None:
    limits = ConnectionLimits(max_connections=10, max_waiting=1)
    limits.accept(1, "one")
    limits.note_client(1)
    assert limits.accept(1, "two") is None  # whose end was not heard of
    assert limits.accept(2, "two") == 1


def test_a_key_that_fills_all_places_makes_room_for_others() -> None:
    limits = ConnectionLimits(max_connections=8, max_waiting=4)
    cut: list[int] = []
    for fd in range(20):
        assert limits.accept(fd, "10.0.0.1") is None
        if (excess := limits.note_client(fd, b"greedy")) is not None:
            cut.append(excess)
    assert cut == list(range(7, 20)), "of one key alone the newest"
    assert limits.accept(30, "10.0.0.1") is None
    assert limits.note_client(30, b"modest") == 6
    assert limits.end(30)
    assert not limits.end(6)
