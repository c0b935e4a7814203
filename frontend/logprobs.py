"""Logprobs of tokens: raw arrays as they came over the wire, dicts only for the positions someone looks at.

A dict of 6 entries costs about 10 us to make, mostly for the texts; few users read every position.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import msgspec

from ..ipc.protocol.messages import LogprobsBlock

TokenText = Callable[[int], str]


class Logprob(msgspec.Struct, frozen=True, gc=False):
    """One alternative at one position. rank: its place in the vocabulary, from 1; None: not known."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class LogprobsTable:
    """Logprobs of a growing run of positions, `width` entries each (see LogprobsBlock)."""

    __slots__ = ("_is_ranked", "_logprobs", "_ranks", "_token_ids", "num_positions", "width")

    def __init__(self, is_ranked: bool = True) -> None:
        """`is_ranked`: the entries behind a token's own are the likeliest, not some that were asked for."""
        self._is_ranked = is_ranked
        self.num_positions = 0
        self.width = 0
        self._token_ids = array("i")
        self._logprobs = array("f")
        self._ranks = array("i")

    def add(self, block: LogprobsBlock, skip: int = 0, limit: int | None = None) -> float:
        """Append a block's positions from `skip` on, at most `limit`; the sum of the tokens' own logprobs."""
        stop = block.num_positions if limit is None else min(block.num_positions, skip + limit)
        if skip >= stop:
            return 0.0
        assert self.width in (0, block.width), "the width of a request's logprobs never changes"
        self.width = width = block.width
        part = slice(skip * width * 4, stop * width * 4)
        logprobs = array("f", block.logprobs[part])
        self._logprobs.extend(logprobs)
        self._token_ids.frombytes(block.token_ids[part])
        self._ranks.frombytes(block.ranks[skip * 4 : stop * 4])
        self.num_positions += stop - skip
        return logprobs[0] if len(logprobs) == width else sum(logprobs[::width])

    def entries(self, position: int, text_of: TokenText | None) -> dict[int, Logprob]:
        """Token id -> Logprob of one position: the token itself first, then the others."""
        start = position * self.width
        ids = self._token_ids[start : start + self.width]
        values = self._logprobs[start : start + self.width]
        logprobs: dict[int, Logprob] = {}
        for rank, token_id in enumerate(ids):
            if token_id in logprobs:
                continue  # the token itself, whose rank is known
            text = text_of(token_id) if text_of is not None else None
            place = (rank if self._is_ranked else None) if rank else self._ranks[position]
            logprobs[token_id] = Logprob(values[rank], place, text)
        return logprobs


@dataclass(slots=True, eq=False, repr=False)
class LogprobsList(Sequence["dict[int, Logprob] | None"]):
    """A read-only list[dict[int, Logprob]] over part of a table; each dict is made when it is looked at.

    `leads_with_none`: the list is one longer than its part of the table and begins with None, as a prompt's
    does (nothing precedes its first token).
    """

    table: LogprobsTable
    start: int
    stop: int
    text_of: TokenText | None
    leads_with_none: bool = False

    @property
    def num_entries(self) -> int:
        """Of all its dicts: what they take to make."""
        return (self.stop - self.start) * self.table.width

    def __len__(self) -> int:
        return self.stop - self.start + self.leads_with_none

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob] | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[int, Logprob] | None]: ...
    def __getitem__(self, index: int | slice) -> Any:
        places = range(len(self))[index]
        return [self._at(place) for place in places] if isinstance(places, range) else self._at(places)

    def __iter__(self) -> Iterator[dict[int, Logprob] | None]:
        return map(self._at, range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)  # pyright: ignore[reportUnknownArgumentType]

    def __repr__(self) -> str:
        return repr(list(self))

    def joined(self, later: LogprobsList) -> LogprobsList:
        """This part and the one right after it, as one."""
        assert self.table is later.table
        assert self.stop == later.start
        return LogprobsList(self.table, self.start, later.stop, self.text_of, self.leads_with_none)

    def _at(self, place: int) -> dict[int, Logprob] | None:
        if self.leads_with_none:
            if place == 0:
                return None
            place -= 1
        return self.table.entries(self.start + place, self.text_of)
