"""Figures of a stress run: how long each kill was felt, and the gaps between pieces of output. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
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


class GapFigures(msgspec.Struct, frozen=True):
    """Seconds between consecutive pieces of one answer, over all answers."""

    p50_s: float
    p99_s: float
    max_s: float


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


def find_gaps(records: Sequence[Record]) -> GapFigures | None:
    """None when no answer had two pieces."""
    gaps = sorted(after - before for record in records for before, after in pairwise(record.piece_times))
    if not gaps:
        return None
    return GapFigures(gaps[len(gaps) // 2], gaps[int(0.99 * (len(gaps) - 1))], gaps[-1])


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
