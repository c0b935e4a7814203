"""Timing of one request, as seen by the engine and by this frontend. Plain data; nothing here measures."""

from __future__ import annotations

import msgspec

from ..ipc.protocol.messages import RequestTimes


class RequestMetrics(msgspec.Struct, kw_only=True, gc=False):
    """Comes with a request's finished output. Times are seconds since the epoch; fields are vLLM's.

    queued_ts, scheduled_ts: the engine's; None when the request ended here (a stop string) before the engine
    had told them. first_token_latency: from arrival to this frontend's sight of the first token, in seconds.
    """

    arrival_time: float
    queued_ts: float | None = None
    scheduled_ts: float | None = None
    first_token_ts: float | None = None
    last_token_ts: float | None = None
    first_token_latency: float | None = None
    num_generation_tokens: int = 0
    num_preemptions: int = 0

    def take_times(self, times: RequestTimes) -> None:
        """Put the engine's times, which are nearer to the truth, in place of this frontend's."""
        self.queued_ts = times.queued
        self.scheduled_ts = times.scheduled
        self.num_preemptions = times.num_preemptions
        if self.first_token_ts is not None:
            self.first_token_ts = times.first_token
            self.last_token_ts = times.last_token


def merge_metrics(parts: list[RequestMetrics]) -> RequestMetrics:
    """Metrics of a request from those of its sequences: first of the firsts, last of the lasts, sums."""
    return RequestMetrics(
        arrival_time=parts[0].arrival_time,
        queued_ts=_lowest([part.queued_ts for part in parts]),
        scheduled_ts=_lowest([part.scheduled_ts for part in parts]),
        first_token_ts=_lowest([part.first_token_ts for part in parts]),
        last_token_ts=max(
            (part.last_token_ts for part in parts if part.last_token_ts is not None), default=None
        ),
        first_token_latency=_lowest([part.first_token_latency for part in parts]),
        num_generation_tokens=sum(part.num_generation_tokens for part in parts),
        num_preemptions=sum(part.num_preemptions for part in parts),
    )


def _lowest(values: list[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)
