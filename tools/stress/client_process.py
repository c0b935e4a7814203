"""A client process of a run from outside: started with its plan, watched, and its records read."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from . import client
from .asks import ClientPlan
from .checks import check_records
from .line_process import LineProcess
from .record import Golden, Record, Sent

_decoder: msgspec.json.Decoder[Record | Sent] = msgspec.json.Decoder(Record | Sent)


class ClientProcess(LineProcess):
    """A process of `client`, and the records that it has written."""

    def __init__(self, plan: ClientPlan) -> None:
        self.plan = plan
        self.records: list[Record] = []
        self.sent: list[int] | None = None  # once it has said so
        super().__init__(client.__name__, msgspec.json.encode(plan), self._take_line)

    def end(self, timeout_s: float, golden: Sequence[Golden]) -> list[str]:
        """Wait for its last record; returns what is broken."""
        self.wait_for_last_line(timeout_s)
        self.close()
        kind = self.plan.kind
        if self.sent is None:
            why = f"within {timeout_s:g} s after the last kill, with {len(self.records)} requests ended"
            return [f"the {kind} client did not come to its end {why}"]
        return check_records(self.sent, self.records, golden)

    def _take_line(self, line: bytes) -> bool:
        match _decoder.decode(line):
            case Record() as record:
                self.records.append(record)
                return True
            case Sent(numbers=numbers):
                self.sent = numbers
                return False
