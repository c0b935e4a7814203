"""Layers of a tensor parallel rank, which join the ranks' parts: sums of hidden states, logits side by side.

A layer is built with these only where several ranks share the model. Partial sums are of the model's type, so
in bfloat16 each is rounded before it is added, as other results of a layer are, for half the bytes.
Legend: T tokens, S positions to score, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.choice import native_library
from ...kernels.group.shared_group import SharedGroup
from ...kernels.norm.shared_norm import launch_shared_norm, shared_norm_reference
from ...kernels.program import program as ops
from ...kernels.program.program import Kind, NotNativeError, Program, Slot
from .feed_forward import FeedForward
from .linear import Linear
from .norm import RMSNorm


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Adds up what each rank has of [T, hidden]."""

    group: SharedGroup
    hidden_size: int

    def __call__(self, x: Tensor) -> Tensor:
        """The sum, in x's memory."""
        self.group.all_reduce(x)
        return x

    def emit(self, program: Program, x: Slot) -> None:
        """The same as an operation. Raises NotNativeError where the ranks' tensors are on devices."""
        if not self.group.is_native:
            raise NotNativeError(type(self.group).__name__)
        program.add(Kind.ALL_REDUCE, ops.AllReduce(group=self.group.handle, x=x, size=self.hidden_size))


class RowParallelLinear(Linear):
    """A linear layer whose inputs the ranks have shared out: their results are added."""

    def __init__(self, part: Linear, all_reduce: AllReduce) -> None:
        self._part, self._all_reduce = part, all_reduce
        self.is_exact = part.is_exact

    @property
    def size_bytes(self) -> int:
        return self._part.size_bytes

    def multiply(self, x: Tensor) -> Tensor:
        return self._all_reduce(self._part.multiply(x))

    def emit(self, program: Program, x: Slot, y: Slot) -> None:
        self._part.emit(program, x, y)
        self._all_reduce.emit(program, y)


class SharedRMSNorm(RMSNorm):
    """RMSNorm over all heads of a token, of which each rank has some. It overwrites them."""

    def __init__(self, part: RMSNorm, group: SharedGroup, total_size: int, counts: bool) -> None:
        """`counts`: this rank's squares are part of the sum, as no rank before it has the same heads."""
        self.weight, self.size = part.weight, part.size
        eps, weight_offset, rounds_normed = part.numbers
        self._group = group
        self._table = ops.SharedNormTable(
            weight=self.weight.data_ptr(),
            group=group.handle,
            size=self.size,
            total_size=total_size,
            counts=counts,
            rounds_normed=rounds_normed,
            eps=eps,
            weight_offset=weight_offset,
        )

    def normalize_(self, x: Tensor) -> None:
        launch_shared_norm(native_library(), self._table, self._group, x)

    def emit_in_place(self, program: Program, x: Slot, first: int, stride: int, count: int = 1) -> None:
        assert count == 1
        squares = program.slot("squares", 1, torch.float32)
        operation = ops.NormOfRanks(norm=self._table, x=x, first=first, stride=stride, squares=squares)
        program.add(Kind.SHARED_NORM, operation)


class TorchSharedRMSNorm(RMSNorm):
    """The same by torch's operations, where the ranks' tensors are on devices."""

    def __init__(self, part: RMSNorm, group: SharedGroup, total_size: int, counts: bool) -> None:
        """As SharedRMSNorm's."""
        self.weight, self.size, self.numbers = part.weight, part.size, part.numbers
        self._shared = group, self.weight, total_size, counts

    def normalize_(self, x: Tensor) -> None:
        shared_norm_reference(x, *self._shared, *self.numbers)

    def emit_in_place(self, program: Program, x: Slot, first: int, stride: int, count: int = 1) -> None:  # noqa: ARG002
        raise NotNativeError(type(self).__name__)


@dataclass(frozen=True, slots=True)
class SummedFeedForward:
    """A feed-forward layer whose width the ranks have shared out: their results are added."""

    part: FeedForward
    all_reduce: AllReduce
    is_capturable = False

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.all_reduce(self.part(hidden))

    def emit(self, program: Program, x: Slot, y: Slot) -> None:
        """As FeedForward.emit."""
        self.part.emit(program, x, y)
        self.all_reduce.emit(program, y)


@dataclass(frozen=True, slots=True)
class GatheredLogits:
    """Puts the ranks' parts of the logits side by side, for rank 0, which samples."""

    group: SharedGroup
    vocab_size: int

    def __call__(self, part: Tensor) -> Tensor:
        """float32 [S, V] of this rank's columns of it, in rank 0. In the others nothing, [S, 0]."""
        if self.group.rank > 0:
            self.group.gather_slices(part, None)
            return part[:, :0]
        out = part.new_empty((len(part), self.vocab_size))
        self.group.gather_slices(part, out)
        return out


@dataclass(frozen=True, slots=True)
class VocabParallelLookup:
    """Looks tokens up in an embedding of which each rank has some rows; this one from row `first` on."""

    first: int
    all_reduce: AllReduce

    def gather(self, table: Tensor, input_ids: Tensor) -> Tensor:
        """[T, hidden] for int64 [T]: one rank has a token's row, and the others add zeros."""
        places = input_ids - self.first
        rows = table[places.clamp(0, len(table) - 1)]
        return self.all_reduce(rows.masked_fill_(((places < 0) | (places >= len(table)))[:, None], 0))
