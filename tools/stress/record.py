"""What a client process saw of one request, and how an undisturbed run of it looks."""

from __future__ import annotations

import time
from typing import Literal

import msgspec

from .asks import Behaviour, ClientKind

End = Literal["finished", "left", "failed"]


class Golden(msgspec.Struct, frozen=True):
    """What a request is owed: its output, or those of all beams."""

    token_ids: list[int]
    text: str


class Record(msgspec.Struct, kw_only=True, tag=True):
    """One request from its client's side. Times are time.monotonic, which processes of a machine share."""

    number: int
    ask: int
    client: ClientKind
    behaviour: Behaviour
    began_at: float
    ended_at: float = 0.0
    end: End = "failed"
    error: str = ""
    is_streamed: bool = True  # else it comes in one piece
    num_ends: int = 0  # final outputs that came
    piece_times: list[float] = []  # when each piece of output came, of the last try
    token_ids: list[int] = []  # http has none
    text: str = ""
    num_tokens: int = 0
    broken_at: list[float] = []  # when a try was lost, after which came another

    def take_whole(self, answer: Golden) -> None:
        """The answer has come in one piece."""
        self.piece_times.append(time.monotonic())
        self.token_ids, self.text, self.num_tokens = answer.token_ids, answer.text, len(answer.token_ids)
        self.num_ends, self.end = 1, "finished"


class Sent(msgspec.Struct, frozen=True, tag=True):
    """A client's last words: the numbers of the requests that it has sent."""

    numbers: list[int]
