"""What a request changes in its logits before sampling: allowed ids, bad words, min_tokens, bias, penalties.

A row has a LogitEdits only if it asks for one of these; rows without pay nothing. The order is vLLM's.
Legend: S sampling rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..ipc.sampling_params import SamplingParams
from ..ipc.step import NewRequestData
from ..ipc.token_ids import TOKEN_SIZE_BYTES
from ..ipc.token_lists import is_token_mask, unpack_bad_words
from ..kernels.choice import choose_kernel
from ..kernels.penalties import penalize_reference
from .penalties import TokenPenalties
from .staging import to_device

Ids = NDArray[np.int64]
_NO_IDS: Ids = np.zeros(0, dtype=np.int64)


@dataclass(slots=True)
class LogitEdits:
    """The edits of one row. Ids outside the vocabulary have been dropped."""

    allowed: bytes  # packed as in TokenLists
    banned_ids: Ids  # bad words of one token
    bad_words: list[tuple[bytes, int]]  # (all tokens but the last, packed, and the last)
    max_word_tokens: int  # of the longest of them, without its last
    min_tokens: int
    stop_ids: Ids  # not before min_tokens
    bias_ids: Ids
    bias_values: NDArray[np.float32]
    penalties: TokenPenalties | None

    @property
    def needs_history(self) -> bool:
        """True if the row's last token must be known on the host before the next one can be sampled."""
        return self.penalties is not None or bool(self.bad_words)

    def banned_now(self, history: NDArray[np.int32], num_output: int) -> list[Ids]:
        """Ids that cannot come next after `history` (prompt and output)."""
        banned = [self.banned_ids]
        if num_output < self.min_tokens:
            banned.append(self.stop_ids)
        if self.bad_words:  # 256 words take 20 us: bytes are compared from the end
            tail = history[-self.max_word_tokens :].tobytes()
            last_ids = [last for start, last in self.bad_words if tail.endswith(start)]
            banned.append(np.array(last_ids, dtype=np.int64))
        return banned


@dataclass(slots=True)
class EditedRow:
    """A row of one step's logits with what its edits depend on."""

    index: int  # in the logits
    edits: LogitEdits
    history: NDArray[np.int32]  # prompt and output tokens
    num_output: int


def make_logit_edits(
    request: NewRequestData, prompt: NDArray[np.int32], output: NDArray[np.int32], vocab_size: int
) -> LogitEdits | None:
    """The edits that the request asks for, None if it asks for none."""
    params, lists = request.sampling_params, request.token_lists
    words = [np.frombuffer(word, dtype=np.int32) for word in unpack_bad_words(lists)]
    words = [word for word in words if word.max() < vocab_size]
    penalties = _make_penalties(params, prompt, output)
    has_min_tokens = len(output) < params.min_tokens
    if not (lists.allowed or words or has_min_tokens or lists.bias_ids or penalties):
        return None
    stop_ids = np.union1d(np.array(request.eos_token_ids, dtype=np.int64), _unpack_ids(lists.stop))
    bias_ids = _unpack_ids(lists.bias_ids)
    starts = [(word[:-1].tobytes(), int(word[-1])) for word in words if len(word) > 1]
    return LogitEdits(
        allowed=lists.allowed,
        banned_ids=np.array([word[0] for word in words if len(word) == 1], dtype=np.int64),
        bad_words=starts,
        max_word_tokens=max((len(start) for start, _ in starts), default=0) // TOKEN_SIZE_BYTES,
        min_tokens=params.min_tokens,
        stop_ids=stop_ids[stop_ids < vocab_size] if has_min_tokens else _NO_IDS,
        bias_ids=bias_ids[bias_ids < vocab_size],
        bias_values=np.frombuffer(lists.bias_values, dtype=np.float32)[bias_ids < vocab_size],
        penalties=penalties,
    )


def _make_penalties(
    params: SamplingParams, prompt: NDArray[np.int32], output: NDArray[np.int32]
) -> TokenPenalties | None:
    repetition, frequency, presence = (
        params.repetition_penalty,
        params.frequency_penalty,
        params.presence_penalty,
    )
    if repetition == 1.0 and frequency == 0.0 and presence == 0.0:
        return None
    return TokenPenalties(prompt, output, repetition, frequency, presence)


def _unpack_ids(packed: bytes) -> Ids:
    return np.frombuffer(packed, dtype=np.int32).astype(np.int64)


def apply_logit_edits(logits: Tensor, rows: list[EditedRow]) -> None:
    """Edit float32 `logits` [S, V] in place, one batched operation for each kind of edit."""
    for row in rows:
        if row.edits.allowed:
            _keep_only(logits[row.index], row.edits.allowed)
    _ban(logits, rows)
    _add_bias(logits, rows)
    _penalize(logits, [row for row in rows if row.edits.penalties is not None])


def _keep_only(logits: Tensor, allowed: bytes) -> None:
    """Set what is not in the token set `allowed` to minus infinity in `logits` [V]."""
    size = len(logits)
    if is_token_mask(allowed, size):
        bits = np.unpackbits(np.frombuffer(allowed, dtype=np.uint8), count=size, bitorder="little")
        logits.masked_fill_(to_device(bits == 0, logits.device), -torch.inf)
        return
    ids = _unpack_ids(allowed)
    index = to_device(ids[ids < size], logits.device)
    kept = logits[index]
    logits.fill_(-torch.inf)
    logits[index] = kept


def _ban(logits: Tensor, rows: list[EditedRow]) -> None:
    places: list[Ids] = []
    for row in rows:
        start = row.index * logits.shape[1]
        places += [ids + start for ids in row.edits.banned_now(row.history, row.num_output) if len(ids)]
    if places:
        logits.view(-1).index_fill_(0, _joined(places, logits.device), -torch.inf)


def _add_bias(logits: Tensor, rows: list[EditedRow]) -> None:
    biased = [row for row in rows if len(row.edits.bias_ids)]
    if biased:
        places = _joined([row.edits.bias_ids + row.index * logits.shape[1] for row in biased], logits.device)
        flat = logits.view(-1)  # ids of a row are distinct, so nothing is added twice
        flat[places] = flat[places] + _joined([row.edits.bias_values for row in biased], logits.device)


def _penalize(logits: Tensor, rows: list[EditedRow]) -> None:
    states = [row.edits.penalties for row in rows if row.edits.penalties is not None]
    if not states:
        return
    device = logits.device
    indexes = zip(rows, states, strict=True)
    places = _joined([state.ids + row.index * logits.shape[1] for row, state in indexes], device)
    counts = _joined([state.counts for state in states], device)
    sizes = [len(state.ids) for state in states]
    penalties = to_device(
        np.stack(
            [
                _spread([state.repetition for state in states], sizes),
                _spread([state.frequency for state in states], sizes),
                _spread([state.presence for state in states], sizes),
            ]
        ),
        device,
    )
    _choose_penalize(device)(logits.view(-1), places, counts, penalties)


def _choose_penalize(device: torch.device) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
    if choose_kernel("penalties", torch.float32, device) == "triton":
        from ..kernels.penalties_triton import launch_penalties

        return launch_penalties
    return penalize_reference


def _joined(arrays: Sequence[NDArray[Any]], device: torch.device) -> Tensor:
    return to_device(np.concatenate(arrays), device)


def _spread(values: list[float], sizes: list[int]) -> NDArray[np.float32]:
    return np.repeat(np.array(values, dtype=np.float32), sizes)
