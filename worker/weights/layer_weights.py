"""The narrow weight of a whole layer: projections of the same inputs stacked, and a rank's part of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...ipc.errors import ModelError
from ...ipc.spec.weight_format import WeightFormat
from .integer_weight import IntegerWeight, NarrowWeight, ScaledFp8Weight, check_weight, stack_weights
from .weights import TensorSlice, WeightSource


def take_narrow_stacked(
    source: WeightSource,
    names: Sequence[str],
    formats: Sequence[WeightFormat | None],
    sizes: Sequence[int],
    width: int,
    cut: TensorSlice,
    swaps_halves: bool = False,
) -> NarrowWeight:
    """The cut of several projections in one, [sum(sizes), width], in the formats that a checkpoint stores."""
    weights: list[NarrowWeight] = []
    for name, format, size in zip(names, formats, sizes, strict=True):
        if format is None or format.layout is None:
            text = "a format too: what is multiplied together lies in one layer"
            raise ModelError(name, "in the model's type" if format is None else "plain", text)
        weight = source.take_narrow(name, format, (size, width))
        check_weight(name, weight, format, size, width)
        weights.append(weight)
    stacked = cut_weight(names[0], stack_weights(list(names), weights), cut)
    if swaps_halves:
        half, rows = stacked.num_out // 2, stacked.num_out
        stacked = _take_rows(stacked, TensorSlice((range(half, rows), range(half))))
    return stacked


def cut_weight(name: str, weight: NarrowWeight, cut: TensorSlice) -> NarrowWeight:
    """A rank's part. ModelError where a cut along the inputs does not fall between groups."""
    if cut.rows is not None:
        weight = _take_rows(weight, cut)
    return weight if cut.columns is None else _take_columns(name, weight, cut.columns)


def _take_rows(weight: NarrowWeight, cut: TensorSlice) -> NarrowWeight:
    def take(tensor: Tensor) -> Tensor:
        return torch.cat(TensorSlice(cut.rows).find_pieces([tensor]))

    if isinstance(weight, ScaledFp8Weight):
        scales = weight.scales.repeat_interleave(weight.group_rows or weight.num_out, 0)[: weight.num_out]
        return replace(weight, values=take(weight.values), scales=take(scales), group_rows=1)
    offsets = None if weight.offsets is None else take(weight.offsets)
    return replace(weight, codes=take(weight.codes), scales=take(weight.scales), offsets=offsets)


def _take_columns(name: str, weight: NarrowWeight, columns: range) -> NarrowWeight:
    start, stop, num_in = columns.start, columns.stop, weight.num_in
    group = weight.group_size or num_in
    if isinstance(weight, IntegerWeight) and weight.permutation is not None:
        raise ModelError(name, "inputs in an order of their own", "another order, or tensor_parallel_size=1")
    unit = group if group != num_in else 2
    if start % unit or (stop % unit and stop != num_in):
        sizes = [size for size in range(1, num_in // unit + 1) if num_in % (size * unit) == 0]
        allowed = f"tensor_parallel_size one of {', '.join(map(str, sizes))}: what divides its groups"
        raise ModelError(name, f"{num_in} inputs in groups of {unit}", allowed)
    groups = slice(None) if group == num_in else slice(start // group, -(-stop // group))
    scales = weight.scales[:, groups].contiguous()
    size = weight.group_size
    if isinstance(weight, ScaledFp8Weight):
        return ScaledFp8Weight(weight.values[:, start:stop].contiguous(), scales, weight.group_rows, size)
    part = slice(start, stop) if weight.bits == 8 else slice(start // 2, -(-stop // 2))
    offsets = None if weight.offsets is None else weight.offsets[:, groups].contiguous()
    codes = weight.codes[:, part].contiguous()
    return replace(weight, codes=codes, scales=scales, offsets=offsets, num_in=stop - start)
