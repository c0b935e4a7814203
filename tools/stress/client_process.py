"""A client process of a run from outside: started with its plan, watched, and its records read."""

from __future__ import annotations

from collections.abc import Sequence

from . import client
from .asks import ClientPlan
from .checks import check_records
from .line_process import LineProcess
from .record import Golden, Record, Sent


class ClientProcess(LineProcess[Record, Sent]):
    """A process of `client`, and the records that it has written."""

    def __init__(self, plan: ClientPlan) -> None:
        self.plan = plan
        super().__init__(client.__name__, plan, Record, Sent)

    @property
    def records(self) -> list[Record]:
        """Of the requests that have ended."""
        return self.messages

    def end(self, timeout_s: float, golden: Sequence[Golden]) -> list[str]:
        """Wait for its last record; returns what is broken."""
        self.wait_for_last_line(timeout_s)
        self.close()
        if self.last is None:
            why = f"within {timeout_s:g} s after the last kill, with {len(self.records)} requests ended"
            return [f"the {self.plan.kind} client did not come to its end {why}"]
        return check_records(self.last.numbers, self.records, golden)
