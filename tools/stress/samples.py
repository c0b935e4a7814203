"""Memory and open files of a site's processes over time, and how much of them each request leaves behind."""

from __future__ import annotations

import contextlib
import time
from bisect import bisect_right
from collections.abc import Sequence

import msgspec
import psutil

from .beside import Beside
from .open_files import OpenFiles, count_open_files
from .site import Site

_MIN_LIFE_S = 10.0  # before that a process is still starting


class Sample(msgspec.Struct, frozen=True):
    """One process at one time.monotonic."""

    at: float
    role: str
    pid: int
    rss_bytes: int
    open_files: OpenFiles


class Slope(msgspec.Struct, frozen=True):
    """Growth of the process of a role that lived longest, a request of the whole run that ended meanwhile."""

    role: str
    lived_s: float
    num_requests: int
    rss_bytes: float
    fds: float


class Sampler(Beside):
    """Looks at a site's processes."""

    period_s = 0.5

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.samples: list[Sample] = []
        self._site = site

    def act(self) -> None:
        for role, pid in self._site.list_processes():
            with contextlib.suppress(psutil.Error, OSError):
                rss_bytes = psutil.Process(pid).memory_info().rss
                self.samples.append(Sample(time.monotonic(), role, pid, rss_bytes, count_open_files(pid)))


def find_slopes(samples: Sequence[Sample], end_times: Sequence[float]) -> list[Slope]:
    """One a role with a long life, by least squares over its second half: the first half warms up.

    `end_times`: when requests ended, by time.monotonic.
    """
    ends = sorted(end_times)
    slopes: list[Slope] = []
    for role in dict.fromkeys(sample.role for sample in samples):
        lives: dict[int, list[Sample]] = {}
        for sample in samples:
            if sample.role == role:
                lives.setdefault(sample.pid, []).append(sample)
        longest = max(lives.values(), key=lambda life: life[-1].at - life[0].at)
        if longest[-1].at - longest[0].at >= _MIN_LIFE_S:
            slopes.append(_find_slope(longest, ends))
    return slopes


def _find_slope(life: list[Sample], ends: list[float]) -> Slope:
    late = life[len(life) // 2 :]
    counts = [float(bisect_right(ends, sample.at)) for sample in late]

    return Slope(
        role=life[0].role,
        lived_s=life[-1].at - life[0].at,
        num_requests=int(counts[-1] - counts[0]),
        rss_bytes=_fit_slope(counts, [sample.rss_bytes for sample in late]),
        fds=_fit_slope(counts, [sample.open_files.num_fds for sample in late]),
    )


def _fit_slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread if spread else 0.0
