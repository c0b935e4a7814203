"""RequestQueue: order, lazy removal, and that leftovers do not pile up."""

from __future__ import annotations

import random

import pytest
from fakes import make_request
from quire.core.request import Request, RequestStatus
from quire.core.request_queue import RequestQueue
from quire.core.tenant import Tenant


def make_waiting(rank: int, arrival: float, number: int) -> Request:
    message = make_request(f"r{number}", [1, 2])
    return Request.from_message(message, b"c", Tenant(b"c", 1, 1.0, 0.0), (rank, arrival, number), 64, 0.0)


def finish(queue: RequestQueue, request: Request) -> None:
    request.status = RequestStatus.FINISHED
    queue.remove(request)


def test_requests_leave_by_rank_then_arrival_then_number():
    orders = [(0, 5.0, 1), (1, 0.0, 2), (0, 2.0, 3), (0, 2.0, 4), (-1, 9.0, 5)]
    queue = RequestQueue()
    for rank, arrival, number in orders:
        queue.add(make_waiting(rank, arrival, number))
    assert [queue.pop().order for _ in orders] == sorted(orders)


def test_a_removed_request_is_neither_seen_nor_counted():
    queue = RequestQueue()
    first, second = make_waiting(0, 0.0, 1), make_waiting(0, 1.0, 2)
    queue.add(first)
    queue.add(second)
    finish(queue, first)
    assert len(queue) == 1
    assert list(queue) == [second]
    assert queue.peek() is second
    assert queue.pop() is second
    assert queue.peek() is None
    with pytest.raises(IndexError):
        queue.pop()


def test_removed_requests_do_not_stay_in_memory():
    queue = RequestQueue()
    requests = [make_waiting(0, float(i), i) for i in range(1000)]
    for request in requests:
        queue.add(request)
    random.Random(1).shuffle(requests)
    for request in requests[:990]:
        finish(queue, request)
    assert len(queue) == 10
    assert len(queue._heap) <= 2 * 10 + 64
    assert sorted(r.order for r in requests[990:]) == [queue.pop().order for _ in range(10)]


def test_the_first_few_are_found_in_order_without_those_that_have_ended():
    rng = random.Random(2)
    queue = RequestQueue()
    requests = [make_waiting(0, rng.random(), i) for i in range(300)]
    for request in requests:
        queue.add(request)
    for request in requests[:40]:
        finish(queue, request)
    expected = sorted(requests[40:], key=lambda request: request.order)
    assert queue.first(50) == expected[:50]
    assert queue.first(1000) == expected
    assert RequestQueue().first(3) == []
