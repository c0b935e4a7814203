"""Which requests a screen shows, in which order, and what keys change of that. Knows no screen.

The selected request stays selected when the list moves; when it has ended, the one in its place is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from ....ipc.protocol.engine_views import RequestView

# What rows can be sorted by; the first of a descending one is the largest.
SORTS: dict[str, Callable[[RequestView], Any]] = {
    "request": lambda view: view.request_id,
    "state": lambda view: view.state,
    "progress": lambda view: -view.num_output_tokens / max(1, view.max_total_tokens - view.num_prompt_tokens),
    "tokens": lambda view: -(view.num_prompt_tokens + view.num_output_tokens),
    "holds": lambda view: -view.held_bytes,
    "age": lambda view: -view.age_s,
}
ENGINES_ORDER = "engine"  # running ones, then in the order in which they will run
SORT_NAMES = (ENGINES_ORDER, *SORTS)
_LINE_KEYS = {"up": -1, "k": -1, "down": 1, "j": 1}


class Mode(Enum):
    """What keys are for."""

    LIST = auto()
    HELP = auto()
    CONFIRM = auto()  # of a cancellation


class Action(Enum):
    """What a key asks of who shows the screen."""

    LEAVE = auto()
    CANCEL = auto()  # the request View.asked
    NEXT_ENGINE = auto()


@dataclass
class View:
    """Of one engine."""

    sort: str = ENGINES_ORDER
    is_reversed: bool = False
    selected: str | None = None  # its request_id
    asked: str = ""  # the request that is to be cancelled if the answer is yes
    mode: Mode = Mode.LIST
    message: str = ""  # until the next key
    page_size: int = 1  # rows on the screen, as it was drawn last
    _place: int = 0  # of the selected one when it was last seen
    _offset: int = 0  # of the first row on the screen

    @property
    def is_plain(self) -> bool:
        """Whether nobody has asked for more than the first requests of both kinds."""
        return self.sort == ENGINES_ORDER and not self.is_reversed and self.selected is None

    def order(self, requests: Sequence[RequestView]) -> list[RequestView]:
        """All rows, sorted."""
        key = SORTS.get(self.sort)
        ordered = list(requests) if key is None else sorted(requests, key=key)
        return ordered[::-1] if self.is_reversed else ordered

    def place_rows(self, rows: Sequence[RequestView], num_rows: int) -> int:
        """The number of the first row to show, so that the selected one is among `num_rows`."""
        self.page_size = max(1, num_rows)
        if self.selected is not None:
            self._follow(rows)
            self._offset = max(min(self._offset, self._place), self._place - self.page_size + 1)
        self._offset = max(0, min(self._offset, len(rows) - self.page_size))
        return self._offset

    def press(self, key: str, requests: Sequence[RequestView]) -> Action | None:
        """Take a key: a character, or the name of one such as 'up'."""
        self.message = ""
        match self.mode:
            case Mode.HELP:
                self.mode = Mode.LIST
                return Action.LEAVE if key == "q" else None
            case Mode.CONFIRM:
                self.mode = Mode.LIST
                if key in ("y", "Y"):
                    return Action.CANCEL
                self.message = "not cancelled"
                return None
            case Mode.LIST:
                return self._press_in_list(key, self.order(requests))

    def _press_in_list(self, key: str, rows: Sequence[RequestView]) -> Action | None:
        match key:
            case "q" | "Q":
                return Action.LEAVE
            case "\t":
                return Action.NEXT_ENGINE
            case "h" | "?":
                self.mode = Mode.HELP
            case "s" | "S":
                step = 1 if key == "s" else -1
                self.sort = SORT_NAMES[(SORT_NAMES.index(self.sort) + step) % len(SORT_NAMES)]
                self.message = f"sorted by {self.sort}"
            case "r":
                self.is_reversed = not self.is_reversed
            case "esc":
                self.selected, self._offset = None, 0
            case "c":
                self._ask_to_cancel(rows)
            case "up" | "down" | "k" | "j":
                self._move(rows, _LINE_KEYS[key])
            case "pgup" | "pgdn" | " ":
                self._move(rows, -self.page_size if key == "pgup" else self.page_size)
            case "home" | "g":
                self._move(rows, -len(rows))
            case "end" | "G":
                self._move(rows, len(rows))
            case _:
                self.message = "h: help"
        return None

    def _ask_to_cancel(self, rows: Sequence[RequestView]) -> None:
        self._follow(rows)
        if self.selected is None:
            self.message = "up and down select a request"
        else:
            self.asked, self.mode = self.selected, Mode.CONFIRM

    def _move(self, rows: Sequence[RequestView], step: int) -> None:
        if not rows:
            return
        if self.selected is None:
            self._place = len(rows) - 1 if step >= len(rows) else 0
        else:
            self._follow(rows)
            self._place = max(0, min(len(rows) - 1, self._place + step))
        self.selected = rows[self._place].request_id

    def _follow(self, rows: Sequence[RequestView]) -> None:
        """Find the selected one again."""
        if self.selected is None:
            return
        for place, row in enumerate(rows):
            if row.request_id == self.selected:
                self._place = place
                return
        self._place = max(0, min(self._place, len(rows) - 1))
        self.selected = rows[self._place].request_id if rows else None
