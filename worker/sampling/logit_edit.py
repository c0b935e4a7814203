"""LogitEdit: what a request changes in its logits before sampling, one class a kind of change.

Knows no kind; they are listed in logit_edits.py. Legend: S sampling rows, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...ipc.protocol.step import NewRequestData
from ...kernels.choice import choose_kernel, native_library
from ...kernels.sampling.token_bitmask import apply_token_bitmask_reference, launch_token_bitmask
from ..steps.staging import to_device
from .grammars import Grammars
from .logits_processor import LogitsProcessor

Ids = NDArray[np.int64]
Edit = TypeVar("Edit")  # the class itself


class RowStart(NamedTuple):
    """What an edit may read of a request that enters a row."""

    request: NewRequestData
    prompt: NDArray[np.int32]
    output: NDArray[np.int32]  # not empty for a request that is resumed
    vocab_size: int
    grammars: Grammars | None = None
    processors: Sequence[type[LogitsProcessor]] = ()  # of the engine


class LogitEdit(ABC, Generic[Edit]):
    """One kind of edit of one row, with the state that it keeps for the row: vLLM's LogitsProcessor, by row.

    State is made of prompt and output when a request enters a row, and advanced by each token. So it comes
    back after a preemption or a lost worker without anybody's help. Classes that a command line names are run
    by one of them (CustomProcessors).
    """

    # Whether the row's last token must be on the host, and appended, before the next one can be sampled.
    needs_history: bool = False

    @classmethod
    @abstractmethod
    def make(cls, start: RowStart) -> Self | None:
        """The edit that a request asks for, None for none. Ids outside the vocabulary are dropped."""

    def append(self, token: int) -> None:
        """The row has generated `token`. Called for each one, in order, if `needs_history`."""

    @classmethod
    @abstractmethod
    def apply(cls, logits: Tensor, rows: EditedRows[Edit]) -> None:
        """Edit float32 `logits` [S, V] in place for the `rows` that have this edit; at least one.

        What one row makes impossible goes into its `failure`, and its request alone fails; an exception is
        the whole step's.
        Edits before it have left minus infinity at what they forbid. A row's bits must not depend on the
        other rows: sums are taken of `row_ops.block_sums`.
        """


@dataclass(slots=True)
class EditedRow:
    """A row of one step's logits with what its edits depend on."""

    index: int  # in the logits
    edits: Sequence[LogitEdit[Any]]
    token_ids: NDArray[np.int32]  # prompt and output, then room for more
    num_known: int  # of token_ids; the last one may be missing without `needs_history`
    num_output: int
    work_us: int = 0  # processor time that its edits have taken
    failure: str = ""  # why this row alone cannot be sampled, if an edit has found that out
    is_poison: bool = False  # that was an operator's logits processor

    @property
    def history(self) -> NDArray[np.int32]:
        """Prompt and output tokens, a view."""
        return self.token_ids[: self.num_known]


# The rows of a step that have one kind of edit, each with its own.
EditedRows = Sequence[tuple[EditedRow, Edit]]


def find_places(logits: Tensor, ids: Iterable[tuple[EditedRow, Ids]]) -> Tensor:
    """Indexes into the flat `logits` of the ids of each row, int64."""
    size = logits.shape[1]
    return join([row_ids + row.index * size for row, row_ids in ids], logits.device)


def ban(logits: Tensor, ids: Sequence[tuple[EditedRow, Ids]]) -> None:
    """Set the ids of each row to minus infinity."""
    if any(len(row_ids) for _, row_ids in ids):
        logits.view(-1).index_fill_(0, find_places(logits, ids), -torch.inf)


def keep_only(logits: Tensor, masks: NDArray[np.int32], rows: Ids) -> None:
    """Set what `masks` [R, ceil(V / 32)] do not allow to minus infinity; mask i is of row `rows[i]`."""
    bitmask, index = to_device(masks, logits.device), to_device(rows, logits.device)
    chosen = choose_kernel("token_bitmask", logits.dtype, logits.device)
    if chosen == "native":
        launch_token_bitmask(native_library(), logits, bitmask, index)
    elif chosen == "triton":
        from ...kernels.sampling import token_bitmask_triton

        token_bitmask_triton.launch_token_bitmask(logits, bitmask, index)
    else:
        apply_token_bitmask_reference(logits, bitmask, index)


def join(arrays: Sequence[NDArray[Any]], device: torch.device) -> Tensor:
    """The arrays one after the other, on the device."""
    return to_device(np.concatenate(arrays), device)
