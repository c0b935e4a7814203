"""What a client process saw of one request, and how an undisturbed run of it looks."""

from __future__ import annotations

from typing import Literal

import msgspec

from .asks import Behaviour, ClientKind

End = Literal["finished", "left", "failed"]


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
    num_ends: int = 0  # final outputs that came
    piece_times: list[float] = []  # when each piece of output came, of the last try
    token_ids: list[int] = []  # http has none
    text: str = ""
    num_tokens: int = 0
    broken_at: list[float] = []  # when a try was lost, after which came another


class Sent(msgspec.Struct, frozen=True, tag=True):
    """A client's last words: the numbers of the requests that it has sent."""

    numbers: list[int]


class Golden(msgspec.Struct, frozen=True):
    """What a request is owed."""

    token_ids: list[int]
    text: str
