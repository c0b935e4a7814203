"""Capacity: places and bytes of one process, shared by its callers."""

from __future__ import annotations

import pytest
from quire.frontend.http.caller import TenantUsage
from quire.frontend.http.errors import ApiError
from quire.frontend.http.serving import Capacity, Reservation


def test_one_caller_may_fill_what_is_free_and_no_more() -> None:
    room = Capacity(1000, TenantUsage())
    for number in range(3):
        room.check(Reservation("a", 768), 2304)
        room.enter(f"{number}", Reservation("a", 768))
    with pytest.raises(ApiError, match="2304 sequences are under way"):
        room.check(Reservation("a", 1), 2304)
    room.check(Reservation("b", 1152), 2304)  # a half is its share
    with pytest.raises(ApiError, match="1153"):
        room.check(Reservation("b", 1153), 2304)
    room.leave("0")
    room.check(Reservation("a", 768), 2304)


def test_shares_end_at_twice_the_room() -> None:
    room = Capacity(1000, TenantUsage())
    for number in range(20):
        room.enter(f"{number}", Reservation("a", 1))
    with pytest.raises(ApiError):
        room.check(Reservation("b", 1), 10)


def test_bytes_for_answers_are_shared_too_and_an_answer_larger_than_all_enters_alone() -> None:
    room = Capacity(1000, TenantUsage())
    room.check(Reservation("a", 1, 5000), 10)
    room.enter("large", Reservation("a", 1, 5000))
    for tenant, size in (("a", 1), ("b", 501)):
        with pytest.raises(ApiError, match="max_total_logprobs_bytes"):
            room.check(Reservation(tenant, 1, size), 10)
    room.check(Reservation("a", 1), 10)  # who asks for none is not held up
    room.leave("large")
    room.check(Reservation("b", 1, 501), 10)
    assert (room.num_sequences, room.request_ids) == (0, [])


def test_engines_of_a_process_have_places_of_their_own_and_share_the_bytes_for_logprobs() -> None:
    answer_bytes = TenantUsage()
    one, other = Capacity(1000, answer_bytes), Capacity(1000, answer_bytes)
    one.enter("first", Reservation("a", 10, 900))
    other.check(Reservation("a", 10), 10)
    with pytest.raises(ApiError, match="max_total_logprobs_bytes"):
        other.check(Reservation("a", 1, 200), 10)
    other.check(Reservation("b", 1, 500), 10)  # a half is its share
    one.leave("first")
    other.check(Reservation("a", 1, 1000), 10)
