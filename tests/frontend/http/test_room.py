"""Room: places and bytes of one process, shared by its callers."""

from __future__ import annotations

import pytest
from quire.frontend.http.caller import Tally
from quire.frontend.http.errors import ApiError
from quire.frontend.http.serving import Room, Stay


def test_one_caller_may_fill_what_is_free_and_no_more() -> None:
    room = Room(1000, Tally())
    for number in range(3):
        room.check(Stay("a", 768), 2304)
        room.enter(f"{number}", Stay("a", 768))
    with pytest.raises(ApiError, match="2304 sequences are under way"):
        room.check(Stay("a", 1), 2304)
    room.check(Stay("b", 1152), 2304)  # a half is its share
    with pytest.raises(ApiError, match="1153"):
        room.check(Stay("b", 1153), 2304)
    room.leave("0")
    room.check(Stay("a", 768), 2304)


def test_shares_end_at_twice_the_room() -> None:
    room = Room(1000, Tally())
    for number in range(20):
        room.enter(f"{number}", Stay("a", 1))
    with pytest.raises(ApiError):
        room.check(Stay("b", 1), 10)


def test_bytes_for_answers_are_shared_too_and_an_answer_larger_than_all_enters_alone() -> None:
    room = Room(1000, Tally())
    room.check(Stay("a", 1, 5000), 10)
    room.enter("large", Stay("a", 1, 5000))
    for tenant, size in (("a", 1), ("b", 501)):
        with pytest.raises(ApiError, match="max_total_logprobs_bytes"):
            room.check(Stay(tenant, 1, size), 10)
    room.check(Stay("a", 1), 10)  # who asks for none is not held up
    room.leave("large")
    room.check(Stay("b", 1, 501), 10)
    assert (room.num_sequences, room.request_ids) == (0, [])


def test_engines_of_a_process_have_places_of_their_own_and_share_the_bytes_for_logprobs() -> None:
    answer_bytes = Tally()
    one, other = Room(1000, answer_bytes), Room(1000, answer_bytes)
    one.enter("first", Stay("a", 10, 900))
    other.check(Stay("a", 10), 10)
    with pytest.raises(ApiError, match="max_total_logprobs_bytes"):
        other.check(Stay("a", 1, 200), 10)
    other.check(Stay("b", 1, 500), 10)  # a half is its share
    one.leave("first")
    other.check(Stay("a", 1, 1000), 10)
