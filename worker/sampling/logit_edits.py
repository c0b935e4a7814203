"""The logit edits that there are. A new one is a class here and an entry of LOGIT_EDITS.

A row has edits only if its request asks for some; rows without pay nothing. Filters (top-k, top-p, min-p) are
not edits: they are of weights after temperature, which the sampler's kernels compute and cut in one pass.
Legend: S sampling rows, V vocabulary.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...ipc.decoding import decode_json
from ...ipc.protocol.token_ids import TOKEN_SIZE_BYTES
from ...ipc.protocol.token_lists import is_token_mask, unpack_bad_words
from ...kernels.choice import choose_kernel, native_library
from ...kernels.sampling.penalties import launch_penalties, penalize_reference
from ..steps.staging import to_device
from .grammar import Grammar, Masks
from .logit_edit import EditedRow, EditedRows, Ids, LogitEdit, RowStart, ban, find_places, join, keep_only
from .logits_processor import LogitsProcessor, LogitsRequest

_log = logging.getLogger(__name__)
_logged: set[str] = set()
_MAX_REASON_LENGTH = 1000


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
        # (All tokens but the last, packed, and the last), by the token before the last: most rows have none.
        self._longer: dict[int, list[tuple[bytes, int]]] = {}
        for word in words:
            if len(word) > 1:
                self._longer.setdefault(int(word[-2]), []).append((word[:-1].tobytes(), int(word[-1])))
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
        if not self._longer or (words := self._longer.get(int(history[-1]))) is None:
            return self._first_ids
        tail = history[-max(len(start) for start, _ in words) // TOKEN_SIZE_BYTES :].tobytes()
        last_ids = [last for start, last in words if tail.endswith(start)]
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
        eos = np.array([id_ for id_ in request.eos_token_ids if id_ < start.vocab_size], dtype=np.int64)
        stop_ids = np.union1d(eos, _unpack_ids(request.token_lists.stop, start.vocab_size))
        return cls(min_tokens, stop_ids) if len(stop_ids) else None

    @classmethod
    def apply(cls, logits: Tensor, rows: EditedRows[MinTokens]) -> None:
        ban(logits, [(row, edit._stop_ids) for row, edit in rows if row.num_output < edit._min_tokens])


class LogitBias(LogitEdit["LogitBias"]):
    """logit_bias: a number is added to some tokens' logits."""

    def __init__(self, ids: Ids, values: NDArray[np.float32]) -> None:
        self._ids, self._values = ids, values
        self._seen = ids.ctypes.data, values.ctypes.data, len(ids)  # to ask takes 2 us

    @classmethod
    def make(cls, start: RowStart) -> Self | None:
        lists = start.request.token_lists
        if not lists.bias_ids:
            return None
        ids = np.frombuffer(lists.bias_ids, dtype=np.int32).astype(np.int64)
        is_known = ids < start.vocab_size
        values = np.frombuffer(lists.bias_values, dtype=np.float32)
        return cls(ids[is_known], values[is_known]) if is_known.any() else None

    @classmethod
    def apply(cls, logits: Tensor, rows: EditedRows[LogitBias]) -> None:
        if choose_kernel("penalties", torch.float32, logits.device) == "native":
            # A frequency penalty of -1 on tokens seen `value` times: x - -1 value, to the same bit.
            seen = np.array([(row.index, *edit._seen) for row, edit in rows], dtype=np.int64)
            factors = np.array([(1.0, -1.0, 0.0)] * len(rows), dtype=np.float32)
            launch_penalties(native_library(), logits, seen, factors)
            return
        places = find_places(logits, [(row, edit._ids) for row, edit in rows])
        flat = logits.view(-1)  # ids of a row are distinct, so nothing is added twice
        flat[places] = flat[places] + join([edit._values for _, edit in rows], logits.device)


class CustomProcessors(LogitEdit["CustomProcessors"]):
    """A row's logits processors (logits_processor.py), in the order of the engine's arguments.

    Whatever one of them raises is its row's failure. They edit a copy: what they keep, and what they have
    done before they raise, changes no other row.
    """

    def __init__(self, processors: list[LogitsProcessor], failure: str = "") -> None:
        self._processors = processors
        self._failure = failure
        self._readers = [p for p in processors if type(p).append is not LogitsProcessor.append]
        self.needs_history = bool(self._readers)
        self._append_ns = 0  # since the last step

    @classmethod
    def make(cls, start: RowStart) -> Self | None:
        if not start.processors:
            return None
        extra_args = start.request.extra_args
        try:
            request = LogitsRequest(
                start.request.sampling_params,
                decode_json(extra_args, dict[str, Any]) if extra_args else {},
                start.prompt.tolist(),
                start.output.tolist(),
                start.vocab_size,
            )
            made = [kind.for_request(request) for kind in start.processors]
        except (Exception, SystemExit) as error:
            return cls([], _describe_failure(error))
        processors = [processor for processor in made if processor is not None]
        return cls(processors) if processors else None

    def append(self, token: int) -> None:
        began = time.thread_time_ns()
        try:
            for processor in self._readers:
                processor.append(token)
        except (Exception, SystemExit) as error:
            self._failure = self._failure or _describe_failure(error)
        self._append_ns += time.thread_time_ns() - began

    @classmethod
    def apply(cls, logits: Tensor, rows: EditedRows[CustomProcessors]) -> None:
        for row, edit in rows:
            began = time.thread_time_ns() - edit._append_ns
            edit._append_ns = 0
            try:
                if not edit._failure:
                    edit._apply(logits[row.index])
            except (Exception, SystemExit) as error:
                edit._failure = _describe_failure(error)
            if edit._failure:
                row.failure, row.is_poison = edit._failure, True
            row.work_us += (time.thread_time_ns() - began) // 1000

    def _apply(self, row_logits: Tensor) -> None:
        """Edit a row's logits [V], or raise and leave them."""
        logits = row_logits.clone()
        for processor in self._processors:
            changed = processor.apply(logits)
            if changed is not None:
                logits = changed
            if logits.shape != row_logits.shape:
                shapes = f"{list(logits.shape)}, not {list(row_logits.shape)}"
                raise ValueError(f"{type(processor).__name__}.apply returned logits of shape {shapes}")
        row_logits.copy_(logits)


def _describe_failure(error: BaseException) -> str:
    """The message for the request. The first error of each kind is logged with its traceback."""
    kind = type(error).__name__
    if kind not in _logged:
        _logged.add(kind)
        _log.warning("a logits processor has failed its request", exc_info=error)
    with contextlib.suppress(Exception):
        return f"{kind}: {str(error)[:_MAX_REASON_LENGTH]}"
    return kind


class Penalties(LogitEdit["Penalties"]):
    """repetition_penalty, frequency_penalty, presence_penalty of the distinct tokens of a row.

    The prompt counts for repetition only, the output for all three (OpenAI's and CTRL's definitions).

    Two arrays hold the distinct ids and their counts, so that the sampler reads what is as long as there are
    distinct tokens. The first ids are sorted and found by halving; those that come later by a dict.
    """

    needs_history = True

    def __init__(self, start: RowStart) -> None:
        params = start.request.sampling_params
        self._factors = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        is_seen = np.zeros(start.vocab_size, dtype=np.bool_)
        is_seen[start.output] = True
        if params.repetition_penalty != 1.0:  # without one the prompt has no say
            is_seen[start.prompt] = True
        self._ids = np.flatnonzero(is_seen)
        self._counts = np.zeros(len(self._ids), dtype=np.float32)  # in the output; 0 for those of the prompt
        np.add.at(self._counts, np.searchsorted(self._ids, start.output), 1.0)
        self._first_ids: list[int] = self._ids.tolist()
        self._size = len(self._ids)
        self._later: dict[int, int] = {}  # token -> place
        self._note_addresses()

    @classmethod
    def make(cls, start: RowStart) -> Self | None:
        params = start.request.sampling_params
        is_off = (
            params.repetition_penalty == 1.0 and params.frequency_penalty == params.presence_penalty == 0.0
        )
        return None if is_off else cls(start)

    def append(self, token: int) -> None:
        """Count `token`."""
        place = bisect.bisect_left(self._first_ids, token)
        if place == len(self._first_ids) or self._first_ids[place] != token:
            place = self._later.setdefault(token, self._size)
        if place == self._size:
            self._size += 1
            if place == len(self._ids):
                room = max(64, len(self._ids))
                self._ids = np.concatenate((self._ids, np.zeros(room, dtype=np.int64)))
                self._counts = np.concatenate((self._counts, np.zeros(room, dtype=np.float32)))
                self._note_addresses()
            self._ids[place] = token
        self._counts[place] += 1.0

    def _note_addresses(self) -> None:
        self._addresses = self._ids.ctypes.data, self._counts.ctypes.data  # to ask takes 2 us

    @classmethod
    def apply(cls, logits: Tensor, rows: EditedRows[Penalties]) -> None:
        device = logits.device
        factors = np.array([edit._factors for _, edit in rows], dtype=np.float32)
        chosen = choose_kernel("penalties", torch.float32, device)
        if chosen == "native":
            seen = [(row.index, *edit._addresses, edit._size) for row, edit in rows]
            launch_penalties(native_library(), logits, np.array(seen, dtype=np.int64), factors)
            return
        places = find_places(logits, [(row, edit._ids[: edit._size]) for row, edit in rows])
        counts = join([edit._counts[: edit._size] for _, edit in rows], device)
        sizes = [edit._size for _, edit in rows]
        penalties = to_device(np.repeat(factors.T, sizes, axis=1), device)
        if chosen == "triton":
            from ...kernels.sampling.penalties_triton import launch_penalties as penalize
        else:
            penalize = penalize_reference
        penalize(logits.view(-1), places, counts, penalties)


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
# They note what each row's own work takes; what others take is every row's alike.
_SELF_TIMED = (CustomProcessors, Grammar)


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
            began = time.thread_time_ns()
            kind.apply(logits, rows_of[kind])
            if kind not in _SELF_TIMED:
                share_work([row for row, _ in rows_of[kind]], began)


def share_work(rows: Sequence[EditedRow], began_ns: int) -> None:
    """Note what this thread has computed for all of `rows` alike since then (`time.thread_time_ns`)."""
    work_us = (time.thread_time_ns() - began_ns) // 1000 // len(rows)
    for row in rows:
        row.work_us += work_us


def compute_masks(rows: list[EditedRow], num_rows: int) -> Masks | None:
    """What grammars leave to be sampled, None without one; `rows` are those of S, `num_rows`, with edits."""
    pairs = [(row, edit) for row in rows for edit in row.edits if type(edit) is Grammar]
    return Grammar.compute_masks(pairs, num_rows) if pairs else None


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
