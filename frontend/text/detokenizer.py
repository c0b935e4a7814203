"""Token ids -> text as they arrive, and stop strings in it. One Detokenizer a sequence.

The text is a function of the tokens alone, however they are cut into deliveries: it is put together of pieces
that each token has (token_pieces.py), after the prompt's, so that spaces come right. It never ends in half a
character, of which at most three bytes wait. Knows no requests and no outputs.
"""

from __future__ import annotations

import io
from codecs import utf_8_decode
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from ...ipc.params.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

_MAX_CHARACTER_BYTES = 4


class Detokenizer:
    """Grows `text` token by token.

    stop_string: the one that ended the text, None so far.
    """

    __slots__ = (
        "_added_texts",
        "_holdback",
        "_includes_stop",
        "_is_first",
        "_last",
        "_last_was_added",
        "_length",
        "_longest_stop",
        "_min_tokens",
        "_num_sent",
        "_num_stripped",
        "_num_tokens",
        "_pending",
        "_pieces",
        "_recent",
        "_stops",
        "_text",
        "stop_string",
    )

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self._pieces = tokenizer.find_pieces(params.skip_special_tokens)
        self._stops = params.stop_strings
        self._includes_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._longest_stop = max(map(len, self._stops), default=1)
        # A stop string that shall not be seen must not be sent before it is complete.
        self._holdback = 0 if self._includes_stop else self._longest_stop - 1
        self._added_texts: dict[int, bytes] | None = None
        if not (params.skip_special_tokens or params.spaces_between_special_tokens):
            added = tokenizer.backend.get_added_tokens_decoder()
            self._added_texts = {token_id: token.content.encode() for token_id, token in added.items()}
        self._is_first = True  # no token has been shown
        self._last = 0  # the last token that was shown, once one was
        self._last_was_added = False
        self._num_stripped = self._pieces.num_stripped
        self._pending = b""  # the beginning of a character
        self._num_tokens = self._num_sent = self._length = 0
        self._text = io.StringIO()  # adding to a str would copy it
        self._recent = ""  # its end, as far as a stop string may begin
        self.stop_string: str | None = None
        self._pass_prompt(prompt_token_ids)

    @property
    def text(self) -> str:
        """Everything decoded so far; cut at a stop string once one was found."""
        return self._text.getvalue()

    @property
    def num_characters(self) -> int:
        """The number of characters of `text`."""
        return self._length

    @staticmethod
    def can_wait(params: SamplingParams) -> bool:
        """True if nobody needs text before the end, so that all tokens can be decoded at once."""
        return params.output_kind == RequestOutputKind.FINAL_ONLY and not params.stop

    def add(self, token_ids: Sequence[int]) -> int:
        """Decode tokens up to a stop string; returns how many were taken (all, if there was none)."""
        if not self._stops:
            self._append(self._decode(token_ids))
            return len(token_ids)
        for place, token_id in enumerate(token_ids):
            piece = self._decode((token_id,))
            self._num_tokens += 1
            if piece:
                self._append(piece)
                self._recent = (
                    self._recent[1 - self._longest_stop :] + piece if self._longest_stop > 1 else piece
                )
                if self._num_tokens > self._min_tokens and self._cut_at_stop(len(piece)):
                    return place + 1
        return len(token_ids)

    def finish(self) -> None:
        """Add what still waits for the rest of a character; call once, after the last token."""
        if self._pending and self.stop_string is None:
            text = utf_8_decode(self._pending, self._pieces.errors, True)[0]
            self._append(self._strip(text) if self._num_stripped else text)
            self._pending = b""

    def add_all(self, token_ids: Sequence[int]) -> None:
        """Decode a whole output."""
        self.add(token_ids)
        self.finish()

    def sendable_text(self, is_finished: bool) -> str:
        """All text that may be shown: without the part that could become a stop string while running."""
        if is_finished or not self._holdback:
            return self.text
        return self.text[: max(0, self._length - self._holdback)]

    def take_delta(self, is_finished: bool) -> str:
        """What `sendable_text` has grown by since the last call."""
        end = self._length if is_finished else max(self._num_sent, self._length - self._holdback)
        if end == self._num_sent:
            return ""
        self._text.seek(self._num_sent)
        delta = self._text.read(end - self._num_sent)
        self._text.seek(self._length)
        self._num_sent = end
        return delta

    def _append(self, text: str) -> None:
        self._length += self._text.write(text)

    def _pass_prompt(self, token_ids: Sequence[int]) -> None:
        """Be where the prompt ends: half a character there is completed by the output."""
        pieces, place = self._pieces, 0
        while place < len(token_ids) and (self._is_first or self._num_stripped):
            self._decode(token_ids[place : place + 1])
            place += 1
        tail: list[bytes] = []
        num_needed = _MAX_CHARACTER_BYTES
        for token_id in islice(reversed(token_ids), len(token_ids) - place):
            if pieces.follows and pieces.first[token_id] is not None:
                self._last = token_id
                break
            piece = b"" if pieces.follows else pieces.later[token_id]
            tail.append(piece)
            num_needed -= len(piece)
            if num_needed <= 0:
                break
        self._pending += b"".join(reversed(tail))
        self._decode(())
        self._last_was_added = False

    def _decode(self, token_ids: Sequence[int]) -> str:
        """The characters that these tokens complete."""
        pieces = self._pieces
        if self._is_first or pieces.follows or self._added_texts is not None:
            data = self._pending + b"".join(self._find_each(token_ids))
        else:
            later = pieces.later
            data = b"".join([later[token_id] for token_id in token_ids])
            if self._pending:
                data = self._pending + data
        text, num_used = utf_8_decode(data, pieces.errors, False)
        self._pending = data[num_used:]
        return self._strip(text) if self._num_stripped else text

    def _find_each(self, token_ids: Sequence[int]) -> Iterator[bytes]:
        """The pieces of tokens, where these depend on what is before them."""
        pieces = self._pieces
        for token_id in token_ids:
            piece = pieces.first[token_id]
            if piece is None:
                continue
            if not self._is_first:
                piece = pieces.later[(self._last, token_id) if pieces.follows else token_id]
            if self._added_texts is not None:
                added = self._added_texts.get(token_id)
                if added is not None and self._last_was_added:
                    piece = added  # without the space that the decoder puts there
                self._last_was_added = added is not None
            self._is_first, self._last = False, token_id
            yield piece

    def _strip(self, text: str) -> str:
        """Take off the text's beginning what the decoder takes off."""
        while self._num_stripped and text:
            if not text.startswith(self._pieces.stripped):
                self._num_stripped = 0
                break
            text = text[len(self._pieces.stripped) :]
            self._num_stripped -= 1
        return text

    def _cut_at_stop(self, num_new: int) -> bool:
        """Look for stop strings that end in the last `num_new` characters; the one that ends first wins."""
        recent = self._recent
        best_start, best_end = -1, len(recent) + 1
        for stop in self._stops:
            place = recent.find(stop, max(0, len(recent) - num_new - len(stop) + 1))
            if place < 0:
                continue
            end = place + len(stop)
            if end < best_end or (end == best_end and place < best_start):
                best_start, best_end, self.stop_string = place, end, stop
        if self.stop_string is None:
            return False
        self._length -= len(recent) - (best_end if self._includes_stop else best_start)
        self._text.seek(self._length)
        self._text.truncate()
        return True
