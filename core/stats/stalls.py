"""Stalls: requests that get no token although the device is free.

The device is free while no step is in flight and none can be formed. With live requests that only happens
when something is wrong, so there is usually nothing to keep. Waiting behind other requests, a long step, the
start of a worker and a pacing policy are no stalls. Times are of the wall clock.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from ...ipc.protocol.engine_views import StalledRequest
from ..scheduling.request import Request, RequestStatus

_MAX_SPANS = 1024  # the oldest are forgotten


class _Span(NamedTuple):
    start: float
    end: float
    free_before_s: float  # the sum of the spans before it


class DeviceFreeTime:
    """When the device was free although requests were live."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._spans: deque[_Span] = deque(maxlen=_MAX_SPANS)

    @property
    def is_empty(self) -> bool:
        """Whether it never was."""
        return self._since is None and not self._spans

    def note_free(self, now: float) -> None:
        """No step is in flight, none can be formed, and requests are live."""
        if self._since is None:
            self._since = now

    def note_step(self, now: float) -> None:
        """A step has been formed."""
        if self._since is not None:
            self._spans.append(_Span(self._since, now, self._count_until(self._since)))
            self._since = None

    def measure(self, since: float, now: float) -> float:
        """Seconds of [since, now] in which the device was free."""
        running_s = 0.0 if self._since is None else max(0.0, now - max(self._since, since))
        return running_s + max(0.0, self._count_until(now) - self._count_until(since))

    def _count_until(self, at: float) -> float:
        """Seconds of the spans before `at`."""
        place = bisect_right(self._spans, at, key=lambda span: span.start)
        if place == 0:
            return 0.0
        last = self._spans[place - 1]
        return last.free_before_s + min(at, last.end) - last.start


def find_stall(requests: Iterable[Request], free_time: DeviceFreeTime, now: float) -> StalledRequest | None:
    """The live request that missed most of the device's free time since its last token; None if none did."""
    if free_time.is_empty:
        return None
    waits = [(free_time.measure(max(r.queued_time, r.last_token_time), now), r) for r in requests]
    free_s, request = max(waits, key=lambda wait: wait[0], default=(0.0, None))
    if request is None or free_s <= 0:
        return None
    return StalledRequest(request.request_id, name_stage(request), free_s, request.options.tenant)


def name_stage(request: Request) -> str:
    """How far a live request has got, in words."""
    if request.status is RequestStatus.PREEMPTED:
        return f"preempted after {request.num_output_tokens} tokens, waiting to be computed again"
    if request.status is RequestStatus.WAITING:
        return "queued"
    if request.pooling_params is not None and request.num_computed_tokens == request.num_tokens:
        return "waiting for the worker to answer with its vector"
    if request.num_placeholders:
        return "waiting for a token of the worker"
    if request.num_output_tokens:
        return f"decoding, {request.num_output_tokens} tokens so far"
    return f"in its prompt, {request.num_computed_tokens} of {request.num_prompt_tokens} tokens computed"
