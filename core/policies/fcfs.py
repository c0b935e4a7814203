"""FcfsPolicy: first come, first served; whoever is last in `Request.order` is preempted."""

from __future__ import annotations

from ..scheduling.request_queue import RequestQueue
from .policy import Policy


class FcfsPolicy(Policy[RequestQueue]):
    """The policy `fcfs`. A policy that orders by another `rank` is a subclass with that method."""

    make_queue = RequestQueue
