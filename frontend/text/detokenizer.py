"""Token ids -> text as they arrive, and stop strings in it. One Detokenizer a sequence.

Text never ends in half a character, is decoded in the context of the prompt's end (so that spaces come
right), and does not depend on how tokens are grouped into deliveries. Knows no requests and no outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...ipc.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from tokenizers.decoders import DecodeStream

    from .tokenizer import Tokenizer

_CONTEXT_TOKENS = 6  # of the prompt's end; spacing needs one, half characters up to three more
# Tokens that may wait for the rest of a character. A character has at most four bytes; whatever is longer is
# invalid bytes or skipped special tokens, and the stream would decode all of them again at every step
# (103 us a token after 2,000 repeated end-of-sequence tokens, against 0.6 us).
_MAX_PENDING = 16
_HALF = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Grows `text` token by token.

    text: everything decoded so far; cut at a stop string once one was found.
    stop_string: the one that ended the text, None so far.
    """

    __slots__ = (
        "_backend",
        "_context",
        "_holdback",
        "_includes_stop",
        "_last_was_special",
        "_min_tokens",
        "_num_sent",
        "_num_tokens",
        "_pending",
        "_prompt_tail",
        "_skips_special",
        "_special_texts",
        "_stops",
        "_stream",
        "stop_string",
        "text",
    )

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self._backend = tokenizer.backend
        self._prompt_tail = list(prompt_token_ids[-_CONTEXT_TOKENS:])
        self._skips_special = params.skip_special_tokens
        self._stops = params.stop_strings
        self._includes_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        # A stop string that shall not be seen must not be sent before it is complete.
        longest = max(map(len, self._stops), default=1)
        self._holdback = 0 if self._includes_stop else longest - 1
        self._special_texts: dict[int, str] | None = None
        if not (params.skip_special_tokens or params.spaces_between_special_tokens):
            added = self._backend.get_added_tokens_decoder()
            self._special_texts = {token_id: token.content for token_id, token in added.items()}
        self._last_was_special = False
        self._stream: DecodeStream | None = None
        self._context: int | None = None  # the last token that gave text
        self._pending: list[int] = []  # tokens since then
        self._num_tokens = 0
        self._num_sent = 0
        self.text = ""
        self.stop_string: str | None = None

    @staticmethod
    def can_wait(params: SamplingParams) -> bool:
        """True if nobody needs text before the end, so that all tokens can be decoded at once."""
        return params.output_kind == RequestOutputKind.FINAL_ONLY and not params.stop

    def add(self, token_ids: Sequence[int]) -> int:
        """Decode tokens up to a stop string; returns how many were taken (all, if there was none)."""
        for place, token_id in enumerate(token_ids):
            piece = self._decode_next(token_id)
            self._num_tokens += 1
            if piece:
                self.text += piece
                if self._stops and self._num_tokens > self._min_tokens and self._cut_at_stop(len(piece)):
                    return place + 1
        return len(token_ids)

    def finish(self) -> None:
        """Add what still waits for the rest of a character; call once, after the last token."""
        if self._pending and self.stop_string is None:
            self.text += self._decode(self._pending)
            self._pending = []

    def add_all(self, token_ids: Sequence[int]) -> None:
        """Decode a whole output at once: about 0.1 us a token. Only as the first and only call."""
        context = self._decode(self._prompt_tail)
        text = self._decode([*self._prompt_tail, *token_ids])
        if self._special_texts is None and not context.endswith(_HALF) and text.startswith(context):
            self.text = text[len(context) :]
        else:
            self.add(token_ids)
            self.finish()

    def sendable_text(self, is_finished: bool) -> str:
        """All text that may be shown: without the part that could become a stop string while running."""
        if is_finished or not self._holdback:
            return self.text
        return self.text[: max(0, len(self.text) - self._holdback)]

    def take_delta(self, is_finished: bool) -> str:
        """What `sendable_text` has grown by since the last call."""
        end = len(self.text) if is_finished else max(self._num_sent, len(self.text) - self._holdback)
        delta = self.text[self._num_sent : end]
        self._num_sent = end
        return delta

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=self._skips_special)

    def _decode_next(self, token_id: int) -> str:
        """Text that one more token completes, often '' in the middle of a character."""
        stream = self._stream or self._open_stream()
        try:
            piece = stream.step(self._backend, token_id)
        except Exception:  # the library raises plain Exception when earlier text changes with a later token
            piece = self._restart_at(token_id)
        if self._special_texts is not None:
            piece = self._unspaced(token_id, piece)
        if piece:
            self._context = token_id
            if self._pending:
                self._pending = []
            return piece
        self._pending.append(token_id)
        return self._flush_pending() if len(self._pending) >= _MAX_PENDING else ""

    def _open_stream(self) -> DecodeStream:
        """A stream that has seen the prompt's end. Half a character there is completed by the output."""
        tail = self._prompt_tail
        whole = len(tail)
        while whole and self._decode(tail[:whole]).endswith(_HALF):
            whole -= 1
        stream = self._new_stream(tail[:whole])
        for token_id in tail[whole:]:
            stream.step(self._backend, token_id)
        return stream

    def _new_stream(self, context: list[int]) -> DecodeStream:
        from tokenizers.decoders import DecodeStream

        self._stream = DecodeStream(ids=context, skip_special_tokens=self._skips_special)
        return self._stream

    def _restart_at(self, token_id: int) -> str:
        """Decode what waits together with this token, without context, and go on from there."""
        piece = self._decode([*self._pending, token_id])
        self._context = token_id
        self._restart()
        return piece

    def _flush_pending(self) -> str:
        piece = self._decode(self._pending)
        self._pending = []
        self._restart()
        return piece

    def _restart(self) -> None:
        context = [] if self._context is None else [self._context]
        if context and self._decode(context).endswith(_HALF):
            context = []  # the end of a character made of several tokens
        self._new_stream(context)

    def _unspaced(self, token_id: int, piece: str | None) -> str | None:
        """Special tokens in a row, each but the first without the space that the decoder puts there."""
        assert self._special_texts is not None
        special = self._special_texts.get(token_id)
        if special is not None and self._last_was_special and piece:
            piece = special
        self._last_was_special = special is not None
        return piece

    def _cut_at_stop(self, num_new: int) -> bool:
        """Look for stop strings that end in the last `num_new` characters; the one that ends first wins."""
        text = self.text
        best_start, best_end = -1, len(text) + 1
        for stop in self._stops:
            start = text.find(stop, max(0, len(text) - num_new - len(stop) + 1))
            if start < 0:
                continue
            end = start + len(stop)
            if end < best_end or (end == best_end and start < best_start):
                best_start, best_end, self.stop_string = start, end, stop
        if self.stop_string is None:
            return False
        self.text = text[: best_end if self._includes_stop else best_start]
        return True
