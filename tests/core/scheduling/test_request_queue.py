"""RequestQueue: whatever comes, goes and comes back, requests leave by rank, then arrival, then number."""

from __future__ import annotations

from fakes import make_live
from hypothesis import given, settings
from hypothesis import strategies as st
from quire.core.scheduling.request_queue import RequestQueue


@settings(max_examples=50, deadline=None)
@given(
    orders=st.lists(st.tuples(st.integers(-1, 1), st.sampled_from([0.0, 2.0, 5.0])), max_size=30),
    moved=st.lists(st.integers(0, 29), max_size=60),
)
def test_the_queue_is_what_waits_in_order(orders: list[tuple[int, float]], moved: list[int]) -> None:
    queue = RequestQueue()
    requests = [make_live([1, 2], (*order, number)) for number, order in enumerate(orders)]
    inside = set(requests)
    for request in requests:
        queue.add(request)
    for place in moved:  # one that waits goes, one that has gone comes back
        if place < len(requests):
            request = requests[place]
            (queue.remove if request in inside else queue.add)(request)
            inside ^= {request}
        expected = sorted(inside, key=lambda request: request.order)
        assert list(queue) == queue.first(99) == expected
        assert queue.first(2) == expected[:2]
        assert queue.peek() is (expected[0] if expected else None)
        assert len(queue) == len(expected)
