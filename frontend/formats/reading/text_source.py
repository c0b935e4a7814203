"""Text that comes in pieces, read as if it were whole: a reader is a generator that yields until more comes.

Readers are the modules beside this one; they neither know how text is cut nor keep it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TypeVar

from .marked_text import MARKS, measure_prefix

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A reader. It yields when it needs more text and returns what it has read."""
Sink = Callable[[str], None]

_SPACE = re.compile(r"\s*")
_MAX_HELD_SPACE = 256  # characters of white space before a marker
MAX_WORD = 1000
_MAX_KEPT = 100_000  # characters of a call that is not announced yet


class Unreadable(Exception):
    """What was taken for a call is none."""


class Stop:
    """Where a reader stops: at any of some literals; with any_mark also at every mark."""

    def __init__(self, literals: Sequence[str], any_mark: bool = False) -> None:
        self._texts = tuple(text for text in literals if len(text) > 1)
        ordered = [re.escape(text) for text in sorted(literals, key=len, reverse=True)]
        self.pattern = re.compile("|".join([*ordered, f"[{MARKS}]"] if any_mark else ordered) or "(?!)")

    def measure_held(self, text: str, start: int) -> int:
        """How many characters at the end could be the beginning of what is looked for."""
        return max((measure_prefix(text, start, literal) for literal in self._texts), default=0)


class TextSource:
    """The text that has come and is not read yet: `text` from `position` on."""

    def __init__(self) -> None:
        self.text = ""
        self.position = 0
        self.is_finished = False
        self._is_cut = False
        self._has_run_out = False  # a reader has wanted more than there is
        self.dropped_space = ""  # before the last marker that `read_until` has found
        self._offset = 0  # of `text` in all that has come
        self._mark: int | None = None
        self._held: int | None = None  # the same for `hold`
        self.num_rewound = 0  # characters that were read more than once

    def add(self, text: str, is_finished: bool, is_cut: bool = False) -> None:
        """More has come. What is read is forgotten, but for what is kept.

        is_cut: it has finished before who writes it has ended it.
        """
        kept = [mark - self._offset for mark in (self._mark, self._held) if mark is not None]
        done = min([self.position, *kept])
        self.text = self.text[done:] + text
        self._offset += done
        self.position -= done
        self.is_finished, self._is_cut = is_finished, is_cut

    @property
    def is_cut_off(self) -> bool:
        """Whether a reader, since `keep` was called, has lacked text that was still to be written."""
        return self._has_run_out and self._is_cut

    @property
    def place(self) -> int:
        """How much of all text is read."""
        return self._offset + self.position

    def keep(self, num_before: int = 0) -> None:
        """Keep what is read from here on, and `num_before` characters before, until `rewind` or `forget`."""
        self._mark = self.place - num_before
        self._has_run_out = False

    def rewind(self) -> None:
        """Go back to where `keep` was called."""
        assert self._mark is not None
        self.num_rewound += self.place - self._mark
        self.position = self._mark - self._offset
        self._mark = None

    def forget(self) -> None:
        """Keep nothing any more."""
        self._mark = None

    def hold(self, num_before: int) -> None:
        """As `keep` does, for what tries to read all that follows, until `release`."""
        self._held = self.place - num_before
        self._has_run_out = False

    def release(self, goes_back: bool) -> None:
        """Hold nothing any more, and go back to where `hold` was called or not."""
        assert self._held is not None
        if goes_back:
            self.num_rewound += self.place - self._held
            self.position = self._held - self._offset
            self._mark = None
        self._held = None

    def is_over(self) -> bool:
        """Asked by a reader that needs more text: whether none will come."""
        self._has_run_out = self.is_finished
        return self.is_finished

    def wait(self) -> Steps[None]:
        """Wait for more text. Raises Unreadable if too much is kept."""
        if (self._mark is not None or self._held is not None) and len(self.text) > _MAX_KEPT:
            raise Unreadable
        yield

    def has_more(self) -> Steps[bool]:
        """Wait for a character; False at the end."""
        while self.position >= len(self.text):
            if self.is_over():
                return False
            yield from self.wait()
        return True

    def peek(self) -> Steps[str]:
        """The next character, '' at the end."""
        while self.position >= len(self.text):
            if self.is_over():
                return ""
            yield from self.wait()
        return self.text[self.position]

    def skip_rest(self) -> None:
        """Read all that there is."""
        self.position = len(self.text)

    def skip_space(self) -> Steps[None]:
        """Read white space."""
        while True:
            space = _SPACE.match(self.text, self.position)
            self.position = space.end() if space else self.position
            if self.position < len(self.text) or self.is_over():
                return
            yield from self.wait()

    def accept(self, literal: str) -> Steps[bool]:
        """Read a literal if it comes next."""
        while True:
            there = self.text[self.position : self.position + len(literal)]
            if len(there) == len(literal) or not literal.startswith(there) or self.is_over():
                break
            yield from self.wait()
        if there != literal:
            return False
        self.position += len(literal)
        return True

    def accept_any(self, literals: Iterable[str]) -> Steps[str]:
        """Read white space, and any of some literals if it comes next; '' if none does."""
        yield from self.skip_space()
        for literal in literals:
            if (yield from self.accept(literal)):
                return literal
        return ""

    def accept_marker(self, pieces: Sequence[str]) -> Steps[bool]:
        """Read a marker if it comes next, with any white space before and within it; all of it or nothing."""
        ahead = 0  # characters of it that are there
        for piece in pieces:
            while True:
                space = _SPACE.match(self.text, self.position + ahead)
                ahead = (space.end() if space else 0) - self.position
                there = self.text[self.position + ahead : self.position + ahead + len(piece)]
                is_short = len(there) < len(piece) and piece.startswith(there) and ahead < MAX_WORD
                if not is_short or self.is_over():
                    break
                yield from self.wait()
            if there != piece:
                return False
            ahead += len(piece)
        self.position += ahead
        return True

    def comes(self, pieces: Sequence[str]) -> Steps[bool]:
        """Whether a marker comes next; reads nothing."""
        place = self.place
        is_there = yield from self.accept_marker(pieces)
        self.position -= self.place - place
        return is_there

    def comes_end(self) -> Steps[bool]:
        """Whether nothing but a little white space is left; reads nothing."""
        while True:
            space = _SPACE.match(self.text, self.position)
            end = space.end() if space else self.position
            if end < len(self.text) or end - self.position > MAX_WORD:
                return False
            if self.is_over():
                return True
            yield from self.wait()

    def expect(self, literal: str) -> Steps[None]:
        """Read white space and a literal. Raises Unreadable."""
        yield from self.skip_space()
        if not (yield from self.accept(literal)):
            raise Unreadable

    def read_word(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Read as much as a pattern of single characters matches. Raises Unreadable for a very long word."""
        while True:
            match = pattern.match(self.text, self.position)
            end = match.end() if match else self.position
            if end - self.position > MAX_WORD:
                raise Unreadable
            if end < len(self.text) or self.is_over():
                break
            yield from self.wait()
        word = self.text[self.position : end]
        self.position = end
        return word

    def read_until(self, stop: Stop, sink: Sink, trim: str | None = None) -> Steps[str]:
        """Hand text on up to what `stop` finds, which is read and returned; '' at the end of all text.

        trim: this is left out before what is found; None: all white space.
        """
        while True:
            text, start = self.text, self.position
            if match := stop.pattern.search(text, start):
                end = _trim(text, start, match.start(), trim)
                self.dropped_space = text[end : match.start()]
                self._hand_on(sink, start, end)
                self.position = match.end()
                return match[0]
            if self.is_over():
                self._hand_on(sink, start, len(text))
                return ""
            end = len(text) - stop.measure_held(text, start)
            self._hand_on(sink, start, max(_trim(text, start, end, trim), end - _MAX_HELD_SPACE))
            yield from self.wait()

    def _hand_on(self, sink: Sink, start: int, end: int) -> None:
        self.position = max(start, end)
        if end > start:
            sink(self.text[start:end])


def _trim(text: str, start: int, end: int, trim: str | None) -> int:
    """Where text[start:end] ends without its last white space, or without `trim`."""
    if trim is None:
        return start + len(text[start:end].rstrip())
    return end - len(trim) if trim and text.endswith(trim, start, end) else end
