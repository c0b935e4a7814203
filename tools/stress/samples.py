"""Memory and file descriptors of a site's processes over time, and how fast they grow."""

from __future__ import annotations

import contextlib
import threading
import time

import msgspec
import psutil

from .kills import ROLES
from .site import Site

_PERIOD_S = 0.5
_MIN_LIFE_S = 10.0  # before that a process is still starting


class Sample(msgspec.Struct, frozen=True):
    """One process at one time.monotonic."""

    at: float
    role: str
    pid: int
    rss_bytes: int
    num_fds: int


class Slope(msgspec.Struct, frozen=True):
    """Growth of the process of a role that lived longest, and how long that was."""

    role: str
    lived_s: float
    rss_mb_per_min: float
    fds_per_min: float


class Sampler:
    """Looks at a site's processes in a thread of its own, from `start` to `stop`."""

    def __init__(self, site: Site) -> None:
        self.samples: list[Sample] = []
        self._site = site
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End."""
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(_PERIOD_S):
            self._look("supervisor", self._site.supervisor.pid)
            self._look("server", self._site.server.pid)
            for role in ROLES:
                for pid in self._site.find_pids(role):
                    self._look(role, pid)

    def _look(self, role: str, pid: int) -> None:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            sample = Sample(time.monotonic(), role, pid, process.memory_info().rss, process.num_fds())
            self.samples.append(sample)


def find_slopes(samples: list[Sample]) -> list[Slope]:
    """One a role with a long life, by least squares over its second half: the first half warms up."""
    slopes: list[Slope] = []
    for role in dict.fromkeys(sample.role for sample in samples):
        lives: dict[int, list[Sample]] = {}
        for sample in samples:
            if sample.role == role:
                lives.setdefault(sample.pid, []).append(sample)
        longest = max(lives.values(), key=lambda life: life[-1].at - life[0].at)
        if longest[-1].at - longest[0].at < _MIN_LIFE_S:
            continue
        late = longest[len(longest) // 2 :]
        times = [sample.at for sample in late]
        slopes.append(
            Slope(
                role=role,
                lived_s=longest[-1].at - longest[0].at,
                rss_mb_per_min=60 * _fit_slope(times, [sample.rss_bytes / 1e6 for sample in late]),
                fds_per_min=60 * _fit_slope(times, [float(sample.num_fds) for sample in late]),
            )
        )
    return slopes


def _fit_slope(xs: list[float], ys: list[float]) -> float:
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread if spread else 0.0
