"""RestartBudget: how often, and how soon, a lost process is started again. Pure."""

from __future__ import annotations

MAX_LOSSES = 5  # within LOSS_WINDOW_S; one more is too many
LOSS_WINDOW_S = 60.0
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.1, 5.0  # before the second restart within the window, then doubled


class RestartBudget:
    """How often, and how soon, a lost core is started again."""

    def __init__(self) -> None:
        self._losses: list[float] = []

    def note_loss(self, now: float) -> float | None:
        """Seconds to wait before the next start; None when there were too many losses lately."""
        self._losses = [at for at in self._losses if now - at < LOSS_WINDOW_S] + [now]
        num_before = len(self._losses) - 1
        if num_before >= MAX_LOSSES:
            return None
        return 0.0 if num_before == 0 else min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (num_before - 1))
