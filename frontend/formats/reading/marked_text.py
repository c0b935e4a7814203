"""Generated text in which each marker token is one character that no text can hold: a lone surrogate.

So whoever reads the text can tell a marker from words that look alike, and needs no token ids.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ...text.tokenizer import Tokenizer

MARKS = "\ud800-\udfff"  # for character classes of regular expressions
_FIRST_MARK = 0xD800
_MARK = re.compile(f"[{MARKS}]")


class Marks:
    """Which tokens become which character. hidden_ids: those that become none."""

    def __init__(self, tokenizer: Tokenizer, token_ids: Iterable[int], hidden_ids: Iterable[int]) -> None:
        self.tokenizer = tokenizer
        self.characters: dict[int, str] = dict.fromkeys(hidden_ids, "")
        self._texts: dict[str, str] = {}
        for place, token_id in enumerate(token_ids):
            mark = chr(_FIRST_MARK + place)
            self.characters[token_id] = mark
            self._texts[mark] = self.text_of(token_id)

    def text_of(self, token_id: int) -> str:
        """How a token appears in detokenized text."""
        return self.tokenizer.token_text(token_id).strip()

    def restore(self, text: str) -> str:
        """A text with its marks as the tokens' texts again."""
        return text if text.isascii() else _MARK.sub(lambda mark: self._texts.get(mark[0], mark[0]), text)


class _Awaited(NamedTuple):
    """A marker token whose text has not come yet. num_alike: of its segment, texts that look like it."""

    text: str
    mark: str
    num_alike: int
    num_tokens_before: int


class MarkedText:
    """Puts marks into text that comes in deltas, also where it comes later than its tokens.

    num_tokens: how many have come.
    places: of marks, where each stands and how many tokens are before it; those asked for are forgotten.
    """

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._ids: list[int] = []  # since the last marker token
        self._passed: list[str] = []  # text since the last mark
        self._text = ""  # text that may be the beginning of what is awaited
        self._awaited: deque[_Awaited] = deque()
        self._length = 0
        self.num_tokens = 0
        self.places: deque[tuple[int, int]] = deque()

    def take(self, text: str, token_ids: Sequence[int], is_finished: bool) -> str:
        """More text and tokens; returns marked text. Marks whose text never comes stand at the end."""
        if not self._awaited and self._marks.characters.keys().isdisjoint(token_ids):
            self.num_tokens += len(token_ids)
            self._ids += token_ids
            self._passed.append(text)
            self._length += len(text)
            return text
        for token_id in token_ids:
            self._take_id(token_id)
            self.num_tokens += 1
        self._text += text
        pieces: list[str] = []
        while self._awaited and (place := self._find(self._awaited[0])) is not None:
            awaited = self._awaited.popleft()
            self._put(pieces, self._text[:place], awaited)
            self._text = self._text[place + len(awaited.text) :]
        self._pass_rest(pieces, is_finished)
        return "".join(pieces)

    def num_tokens_before(self, place: int) -> int:
        """How many tokens are before a place of the marked text, exactly if a mark stands there."""
        while self.places and self.places[0][0] < place:
            self.places.popleft()
        return self.places[0][1] if self.places and self.places[0][0] == place else self.num_tokens

    def _take_id(self, token_id: int) -> None:
        mark = self._marks.characters.get(token_id)
        if mark is None:
            self._ids.append(token_id)
            return
        text = self._marks.text_of(token_id)
        num_alike = self._marks.tokenizer.decode(self._ids).count(text) if self._ids and text else 0
        self._awaited.append(_Awaited(text, mark, num_alike, self.num_tokens))
        self._ids = []

    def _find(self, awaited: _Awaited) -> int | None:
        """Where in the new text an awaited token stands."""
        passed = "".join(self._passed) if awaited.num_alike else ""
        text, place = passed + self._text, 0
        for _ in range(awaited.num_alike):
            place = text.find(awaited.text, place) + len(awaited.text)
            if place < len(awaited.text):
                return None
        place = text.find(awaited.text, place)
        if place < 0:
            return None
        return max(0, place - len(passed))

    def _put(self, pieces: list[str], text: str, awaited: _Awaited) -> None:
        pieces += (text, awaited.mark)
        self._length += len(text)
        if awaited.mark:
            self.places.append((self._length, awaited.num_tokens_before))
            self._length += 1
        self._passed = []

    def _pass_rest(self, pieces: list[str], is_finished: bool) -> None:
        num_held = 0
        if self._awaited and not is_finished:
            num_held = measure_prefix(self._text, 0, self._awaited[0].text)
        text = self._text[: len(self._text) - num_held]
        self._text = self._text[len(text) :]
        self._passed.append(text)
        self._length += len(text)
        pieces.append(text)
        if is_finished and self._awaited and measure_prefix(text, 0, self._awaited[0].text):
            self._awaited.popleft()  # a stop string has cut it: its text is there as far as it goes
        while is_finished and self._awaited:
            self._put(pieces, "", self._awaited.popleft())


def measure_prefix(text: str, start: int, literal: str) -> int:
    """How many characters at the end of a text, from `start` on, could be the beginning of `literal`."""
    first = text.find(literal[0], max(start, len(text) - len(literal) + 1)) if literal else -1
    while first >= 0 and not literal.startswith(text[first:]):
        first = text.find(literal[0], first + 1)
    return len(text) - first if first >= 0 else 0
