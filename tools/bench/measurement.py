"""What was measured: every round of every contestant on every workload."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from .contest import JobResult

QUIRE = "quire"


@dataclass(slots=True)
class Measurement:
    """All rounds of one contestant on one workload."""

    results: list[JobResult] = field(default_factory=list[JobResult])
    num_requests_of: int = 0  # the workload's; more than a result's when a sample was run
    error: str | None = None

    @property
    def rate(self) -> float | None:
        """Median generated tokens per second; None without a result."""
        if not self.results:
            return None
        return statistics.median(r.num_output_tokens / r.seconds for r in self.results)

    @property
    def is_sample(self) -> bool:
        """True if only some of the requests were run."""
        return bool(self.results) and self.results[0].num_requests < self.num_requests_of

    @property
    def last_seconds(self) -> float:
        """Of the newest round, 0 before the first."""
        return self.results[-1].seconds if self.results else 0.0


Measurements = dict[str, dict[str, Measurement]]  # workload -> contestant -> measurement
