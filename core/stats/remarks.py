"""Remarks: lines for the log about requests that were refused or cost much; a flood of them is one line."""

from __future__ import annotations

from collections.abc import Callable

PERIOD_S = 10.0


class Remarks:
    """At most one line of a kind in PERIOD_S. `clock` is monotonic. Texts must hold nothing of a prompt."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pending: dict[str, tuple[int, str]] = {}  # kind -> (how many, the last one's text)
        self._due_at: dict[str, float] = {}

    def note(self, kind: str, text: str) -> None:
        """Count one more of a kind."""
        count, _ = self._pending.get(kind, (0, ""))
        self._pending[kind] = (count + 1, text)

    def take(self) -> list[str]:
        """The lines that are due."""
        if not self._pending:
            return []
        now = self._clock()
        due = [kind for kind in self._pending if now >= self._due_at.get(kind, now)]
        lines: list[str] = []
        for kind in due:
            count, text = self._pending.pop(kind)
            self._due_at[kind] = now + PERIOD_S
            lines.append(f"{kind}: {text}" + (f" (and {count - 1} more before it)" if count > 1 else ""))
        return lines
