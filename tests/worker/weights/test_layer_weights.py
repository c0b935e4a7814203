"""A rank's part of a narrow weight: the same numbers, or a refusal that says how many could share it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from quire.ipc.errors import ModelError
from quire.worker.weights.integer_weight import (
    IntegerWeight,
    NarrowWeight,
    ScaledFp8Weight,
    dequantize,
    pack_nibbles,
)
from quire.worker.weights.layer_weights import cut_weight
from quire.worker.weights.weights import TensorSlice


def make_integers(bits: int, group_size: int) -> IntegerWeight:
    codes = torch.randint(0, 1 << bits, (20, 96), dtype=torch.uint8)
    groups = -(-96 // group_size) if group_size else 1
    scales, offsets = torch.rand(20, groups), torch.rand(20, groups)
    return IntegerWeight(codes if bits == 8 else pack_nibbles(codes), scales, bits, 96, group_size, offsets)


WEIGHTS: list[NarrowWeight] = [
    make_integers(4, 16),
    make_integers(4, 0),
    make_integers(8, 32),
    ScaledFp8Weight(torch.randn(20, 96).to(torch.float8_e4m3fn), torch.rand(1, 1), 0, 0),
    ScaledFp8Weight(torch.randn(20, 96).to(torch.float8_e4m3fn), torch.rand(2, 6), 16, 16),
]


@pytest.mark.parametrize("weight", WEIGHTS, ids=range(len(WEIGHTS)))
def test_a_part_stands_for_the_same_numbers(weight: NarrowWeight) -> None:
    whole = dequantize(weight)
    rows = cut_weight("w", weight, TensorSlice(rows=(range(3, 7), range(15, 18))))
    assert torch.equal(dequantize(rows), torch.cat([whole[3:7], whole[15:18]]))
    columns = cut_weight("w", weight, TensorSlice(columns=range(32, 64)))
    assert torch.equal(dequantize(columns), whole[:, 32:64])
    assert torch.equal(dequantize(cut_weight("w", weight, TensorSlice())), whole)


def test_a_cut_within_a_group_is_refused_with_the_ranks_that_could_share_it() -> None:
    allowed = r"^w='96 inputs in groups of 32': expected tensor_parallel_size one of 1, 3:"
    with pytest.raises(ModelError, match=allowed):
        cut_weight("w", make_integers(8, 32), TensorSlice(columns=range(48, 96)))
    turned = replace(make_integers(8, 32), permutation=torch.randperm(96).int())
    with pytest.raises(ModelError, match="w='inputs in an order of their own'"):
        cut_weight("w", turned, TensorSlice(columns=range(32, 64)))
