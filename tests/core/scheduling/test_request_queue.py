"""RequestQueue: order, lazy removal, return, and that leftovers do not pile up."""

from __future__ import annotations

import random

from fakes import make_request
from quire.core.scheduling.request import Request
from quire.core.scheduling.request_queue import RequestQueue
from quire.core.scheduling.tenant import Tenant


def make_waiting(rank: int, arrival: float, number: int) -> Request:
    message = make_request(f"r{number}", [1, 2])
    return Request.from_message(message, b"c", Tenant(b"c", 1.0), (rank, arrival, number), 64, 0.0)


def pop(queue: RequestQueue) -> Request:
    request = queue.peek()
    assert request is not None
    queue.remove(request)
    return request


def test_requests_leave_by_rank_then_arrival_then_number():
    orders = [(0, 5.0, 1), (1, 0.0, 2), (0, 2.0, 3), (0, 2.0, 4), (-1, 9.0, 5)]
    queue = RequestQueue()
    for rank, arrival, number in orders:
        queue.add(make_waiting(rank, arrival, number))
    assert [pop(queue).order for _ in orders] == sorted(orders)


def test_a_removed_request_is_neither_seen_nor_counted():
    queue = RequestQueue()
    first, second = make_waiting(0, 0.0, 1), make_waiting(0, 1.0, 2)
    queue.add(first)
    queue.add(second)
    queue.remove(first)
    assert len(queue) == 1
    assert list(queue) == [second]
    assert queue.peek() is second
    assert pop(queue) is second
    assert queue.peek() is None


def test_a_request_that_comes_back_is_at_its_old_place_once():
    queue = RequestQueue()
    requests = [make_waiting(0, float(i), i) for i in range(5)]
    for request in requests:
        queue.add(request)
    queue.remove(requests[3])  # its entry is still in the heap
    queue.remove(requests[0])
    for request in (requests[3], requests[0]):
        queue.add(request)
    assert len(queue) == 5
    assert queue.first(9) == requests
    assert [pop(queue) for _ in requests] == requests


def test_removed_requests_do_not_stay_in_memory():
    queue = RequestQueue()
    requests = [make_waiting(0, float(i), i) for i in range(1000)]
    for request in requests:
        queue.add(request)
    random.Random(1).shuffle(requests)
    for request in requests[:990]:
        queue.remove(request)
    assert len(queue) == 10
    assert len(queue._heap) <= 2 * 10 + 64
    assert sorted(r.order for r in requests[990:]) == [pop(queue).order for _ in range(10)]


def test_the_first_few_are_found_in_order_without_those_that_have_ended():
    rng = random.Random(2)
    queue = RequestQueue()
    requests = [make_waiting(0, rng.random(), i) for i in range(300)]
    for request in requests:
        queue.add(request)
    for request in requests[:40]:
        queue.remove(request)
    expected = sorted(requests[40:], key=lambda request: request.order)
    assert queue.first(50) == expected[:50]
    assert queue.first(1000) == expected
    assert RequestQueue().first(3) == []
