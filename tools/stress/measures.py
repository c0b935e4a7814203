"""Figures of a run: how long answers took in a phase of it, and how long each kill was felt. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec

from .kills import Strike
from .record import Record

_FELT_WITHIN_S = 15.0  # of a kill, unless the next one comes before


class Recovery(msgspec.Struct, frozen=True):
    """One kill and how long it was felt: None when nothing was running that could feel it, or of a client."""

    at_s: float  # from the start of the load
    role: str
    method: str
    recovery_s: float | None


class Phase(msgspec.Struct, frozen=True):
    """A part of the run, by time.monotonic. is_to_blame: for waits that begin in it, else that end in it."""

    name: str
    begins_at: float
    ends_at: float
    is_to_blame: bool = False

    def covers(self, at: float) -> bool:
        """Whether `at` is within it."""
        return self.begins_at <= at < self.ends_at

    def has(self, since: float, until: float) -> bool:
        """Whether a wait is counted here."""
        return self.covers(since if self.is_to_blame else until)


WHOLE = Phase("", 0.0, float("inf"))


class Times(msgspec.Struct, frozen=True):
    """Of some waits, in seconds."""

    num: int
    p50_s: float
    p99_s: float
    max_s: float

    def list_ms(self) -> list[str]:
        """p50, p99 and max, as tables have them."""
        return [f"{1e3 * time_s:.0f}" for time_s in (self.p50_s, self.p99_s, self.max_s)]


class Latency(msgspec.Struct, frozen=True):
    """Between pieces of an answer, and from a request to its first piece."""

    gaps: Times
    first: Times


def measure(records: Sequence[Record], phase: Phase = WHOLE) -> Latency | None:
    """Of the phase's waits; None if there are none."""
    gaps = measure_waits(
        wait for record in records for wait in pairwise(record.piece_times) if phase.has(*wait)
    )
    first = measure_waits(
        (record.began_at, record.piece_times[0])
        for record in records
        if record.piece_times and phase.has(record.began_at, record.piece_times[0])
    )
    return None if gaps is None or first is None else Latency(gaps, first)


def measure_waits(waits: Iterable[tuple[float, float]]) -> Times | None:
    """Of (since, until); None if there are none."""
    times = sorted(after - before for before, after in waits)
    if not times:
        return None
    return Times(len(times), times[len(times) // 2], times[int(0.99 * (len(times) - 1))], times[-1])


def find_recoveries(
    records: Sequence[Record], strikes: Sequence[Strike], started_at: float
) -> list[Recovery]:
    """One for each kill."""
    times = sorted(at for record in records for at in record.piece_times)
    ends = [*(strike.at for strike in strikes), float("inf")][1:]
    recoveries: list[Recovery] = []
    for strike, next_at in zip(strikes, ends, strict=True):
        end = min(next_at, strike.at + _FELT_WITHIN_S)
        role = strike.kill.role
        felt_s = None
        if role == "http":
            felt_s = _find_retried_s(records, strike.at, end)
        elif role != "client":
            heard = times[bisect_left(times, strike.at) : bisect_left(times, end)]
            felt_s = _find_silence_s(records, [strike.at, *heard])
        recoveries.append(Recovery(strike.at - started_at, role, strike.kill.method, felt_s))
    return recoveries


def _find_silence_s(records: Sequence[Record], times: Sequence[float]) -> float | None:
    """From the first of these times, the kill, to the end of the longest silence over all streams.

    Not to the next token: those that were on their way still come. A time without streams is no silence.
    """
    gaps = sorted(pairwise(times), key=lambda gap: gap[0] - gap[1])
    longest_s, felt_s = 0.0, None
    for before, after in gaps:
        if after - before <= longest_s:
            break
        since = _find_awaited_since(records, before, after)
        if since is not None and after - since > longest_s:
            longest_s, felt_s = after - since, after - times[0]
    return felt_s


def _find_awaited_since(records: Sequence[Record], before: float, after: float) -> float | None:
    """Since when somebody waits for the next piece of a stream in this gap; None if nobody does."""
    return min(
        (
            max(before, record.began_at)
            for record in records
            if record.is_streamed and record.began_at < after
            if before < max([record.ended_at, *record.piece_times[-1:]])
        ),
        default=None,
    )


def _find_retried_s(records: Sequence[Record], begin: float, end: float) -> float | None:
    """From the kill until the last request whose connection it broke has its first piece again."""
    again = [
        min(at for at in record.piece_times if at > begin) - begin
        for record in records
        if record.is_streamed
        if any(begin <= at < end for at in record.broken_at) and record.piece_times[-1:] > [begin]
    ]
    return max(again) if again else None
