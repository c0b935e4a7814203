"""The attacker process from outside."""

from __future__ import annotations

import msgspec

from ..line_process import LineProcess
from . import attacker
from .plan import AttackPlan, Played, TurnReport

_decoder: msgspec.json.Decoder[TurnReport | Played] = msgspec.json.Decoder(TurnReport | Played)


class AttackerProcess(LineProcess):
    """A process of `attacker`, and its reports."""

    def __init__(self, plan: AttackPlan) -> None:
        self.reports: list[TurnReport] = []
        self.has_played = False  # all of the plan
        super().__init__(attacker.__name__, msgspec.json.encode(plan), self._take_line)

    def _take_line(self, line: bytes) -> bool:
        match _decoder.decode(line):
            case TurnReport() as report:
                self.reports.append(report)
                return True
            case Played():
                self.has_played = True
                return False
