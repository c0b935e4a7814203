"""The logit edits that there are. A new one is a class here and an entry of LOGIT_EDITS.

A row has edits only if its request asks for some; rows without pay nothing. Filters (top-k, top-p, min-p) are
not edits: they are of weights after temperature, which the sampler's kernels compute and cut in one pass.
Legend: S sampling rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ...ipc.token_ids import TOKEN_SIZE_BYTES
from ...ipc.token_lists import is_token_mask, unpack_bad_words
from .custom_processors import CustomProcessors
from .grammar import Grammar, Masks
from .logit_edit import EditedRow, EditedRows, Ids, LogitEdit, RowStart, ban, find_places, join, keep_only
from .penalties import Penalties


class AllowedTokens(LogitEdit["AllowedTokens"]):
    """allowed_token_ids: nothing else can be sampled."""

    def __init__(self, mask: NDArray[np.int32]) -> None:
        self._mask = mask  # [ceil(V / 32)]

    @classmethod
    def make(cls, start: RowStart) -> Self | None:
        allowed = start.request.token_lists.allowed
        return cls(_make_mask(allowed, start.vocab_size)) if allowed else None

    @classmethod
    def apply(cls, logits: Tensor, rows: EditedRows[AllowedTokens]) -> None:
        indexes = np.array([row.index for row, _ in rows], dtype=np.int64)
        keep_only(logits, np.stack([edit._mask for _, edit in rows]), indexes)


class BadWords(LogitEdit["BadWords"]):
    """bad_words: a word's last token cannot follow the others."""

    def __init__(self, words: list[NDArray[np.int32]]) -> None:
        self._first_ids = np.array([word[0] for word in words if len(word) == 1], dtype=np.int64)
        # (All tokens but the last, packed, and the last.)
        self._longer = [(word[:-1].tobytes(), int(word[-1])) for word in words if len(word) > 1]
        self._max_start = max((len(start) for start, _ in self._longer), default=0) // TOKEN_SIZE_BYTES
        self.needs_history = bool(self._longer)

    @classmethod
    def make(cls, start: RowStart) -> Self | None:
        packed = unpack_bad_words(start.request.token_lists)
        words = [np.frombuffer(word, dtype=np.int32) for word in packed]
        words = [word for word in words if word.max() < start.vocab_size]
        return cls(words) if words else None

    @classmethod
    def apply(cls, logits: Tensor, rows: EditedRows[BadWords]) -> None:
        ban(logits, [(row, edit._find_banned(row.history)) for row, edit in rows])

    def _find_banned(self, history: NDArray[np.int32]) -> Ids:
        if not self._longer:
            return self._first_ids
        tail = history[-self._max_start :].tobytes()  # 256 words take 20 us: bytes are compared from the end
        last_ids = [last for start, last in self._longer if tail.endswith(start)]
        return np.concatenate((self._first_ids, np.array(last_ids, dtype=np.int64)))


class MinTokens(LogitEdit["MinTokens"]):
    """min_tokens: no token that ends the answer before so many."""

    def __init__(self, min_tokens: int, stop_ids: Ids) -> None:
        self._min_tokens, self._stop_ids = min_tokens, stop_ids

    @classmethod
    def make(cls, start: RowStart) -> Self | None:
        request, min_tokens = start.request, start.request.sampling_params.min_tokens
        if len(start.output) >= min_tokens:
            return None
        eos = np.array([one for one in request.eos_token_ids if one < start.vocab_size], dtype=np.int64)
        stop_ids = np.union1d(eos, _unpack_ids(request.token_lists.stop, start.vocab_size))
        return cls(min_tokens, stop_ids) if len(stop_ids) else None

    @classmethod
    def apply(cls, logits: Tensor, rows: EditedRows[MinTokens]) -> None:
        ban(logits, [(row, edit._stop_ids) for row, edit in rows if row.num_output < edit._min_tokens])


class LogitBias(LogitEdit["LogitBias"]):
    """logit_bias: a number is added to some tokens' logits."""

    def __init__(self, ids: Ids, values: NDArray[np.float32]) -> None:
        self._ids, self._values = ids, values

    @classmethod
    def make(cls, start: RowStart) -> Self | None:
        lists = start.request.token_lists
        ids = np.frombuffer(lists.bias_ids, dtype=np.int32).astype(np.int64)
        is_known = ids < start.vocab_size
        values = np.frombuffer(lists.bias_values, dtype=np.float32)
        return cls(ids[is_known], values[is_known]) if is_known.any() else None

    @classmethod
    def apply(cls, logits: Tensor, rows: EditedRows[LogitBias]) -> None:
        places = find_places(logits, [(row, edit._ids) for row, edit in rows])
        flat = logits.view(-1)  # ids of a row are distinct, so nothing is added twice
        flat[places] = flat[places] + join([edit._values for _, edit in rows], logits.device)


# In the order in which they are applied, which is vLLM's; a grammar last, so that nothing overrules it.
LOGIT_EDITS: tuple[type[LogitEdit[Any]], ...] = (
    AllowedTokens,
    BadWords,
    MinTokens,
    LogitBias,
    CustomProcessors,
    Penalties,
    Grammar,
)
ALL_BUT_GRAMMAR = LOGIT_EDITS[:-1]


def make_logit_edits(start: RowStart) -> list[LogitEdit[Any]]:
    """The edits that the request asks for; seldom any."""
    return [edit for kind in LOGIT_EDITS if (edit := kind.make(start)) is not None]


def apply_logit_edits(
    logits: Tensor, rows: list[EditedRow], kinds: Sequence[type[LogitEdit[Any]]] = LOGIT_EDITS
) -> None:
    """Edit float32 `logits` [S, V] in place, each of `kinds` for all rows at once."""
    rows_of: dict[type[LogitEdit[Any]], list[tuple[EditedRow, Any]]] = {}
    for row in rows:
        for edit in row.edits:
            rows_of.setdefault(type(edit), []).append((row, edit))
    for kind in kinds:
        if kind in rows_of:
            kind.apply(logits, rows_of[kind])


def compute_masks(rows: list[EditedRow], num_rows: int) -> Masks | None:
    """What grammars leave to be sampled, None without one; `rows` are those of S, `num_rows`, with edits."""
    found = [(row, edit) for row in rows for edit in row.edits if type(edit) is Grammar]
    return Grammar.compute_masks(found, num_rows) if found else None


def _unpack_ids(packed: bytes, vocab_size: int) -> Ids:
    ids = np.frombuffer(packed, dtype=np.int32).astype(np.int64)
    return ids[ids < vocab_size]


def _make_mask(allowed: bytes, vocab_size: int) -> NDArray[np.int32]:
    """int32 [ceil(V / 32)] with the bits of a packed token set."""
    mask = np.zeros(-(-vocab_size // 32) * 4, dtype=np.uint8)
    if is_token_mask(allowed, vocab_size):
        mask[: len(allowed)] = np.frombuffer(allowed, dtype=np.uint8)
    else:
        ids = _unpack_ids(allowed, vocab_size)
        np.bitwise_or.at(mask, ids // 8, np.left_shift(1, ids % 8).astype(np.uint8))
    return mask.view(np.int32)
