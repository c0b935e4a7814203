"""The one form of narrow weights: what its numbers stand for, and several of them as one layer's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from quire.ipc.errors import ConfigError, ModelError
from quire.ipc.spec.weight_format import WeightFormat, WeightFormats, make_online_formats
from quire.worker.weights.integer_weight import (
    IntegerWeight,
    ScaledFp8Weight,
    check_weight,
    dequantize,
    pack_nibbles,
    stack_weights,
    unpack_nibbles,
)


def make_integers(
    num_out: int = 6,
    num_in: int = 40,
    bits: int = 4,
    group_size: int = 16,
    has_offsets: bool = False,
    seed: int = 0,
) -> IntegerWeight:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (num_out, num_in), generator=generator, dtype=torch.uint8)
    groups = -(-num_in // group_size) if group_size else 1
    scales = torch.rand(num_out, groups, generator=generator)
    offsets = torch.rand(num_out, groups, generator=generator) if has_offsets else None
    return IntegerWeight(
        codes if bits == 8 else pack_nibbles(codes), scales, bits, num_in, group_size, offsets
    )


def test_nibbles_come_back_as_they_were_also_of_an_odd_number() -> None:
    codes = torch.arange(3 * 7, dtype=torch.uint8).view(3, 7) % 16
    assert pack_nibbles(codes)[0].tolist() == [0x10, 0x32, 0x54, 0x06]
    assert torch.equal(unpack_nibbles(pack_nibbles(codes), 7), codes)


def test_a_code_stands_for_its_distance_from_the_middle_times_its_groups_scale() -> None:
    weight = IntegerWeight(pack_nibbles(torch.tensor([[0, 8] + [15] * 16], dtype=torch.uint8)),
                           torch.tensor([[0.5, 3.0]]), 4, 18, 16)  # fmt: skip
    assert dequantize(weight)[0, [0, 1, 2, 15, 16, 17]].tolist() == [-4.0, 0.0, 3.5, 3.5, 21.0, 21.0]


def test_offsets_a_codebook_and_an_order_of_inputs_are_kept() -> None:
    codes = torch.tensor([[1, 2, 3]], dtype=torch.uint8)
    weight = IntegerWeight(codes, torch.tensor([[2.0]]), 8, 3, 0, torch.tensor([[5.0]]))
    assert dequantize(weight).tolist() == [[-3.0, -1.0, 1.0]]
    order = torch.tensor([2, 0, 1], dtype=torch.int32)
    assert dequantize(replace(weight, permutation=order)).tolist() == [[-1.0, 1.0, -3.0]]
    book = torch.arange(16).flip(0).float() / 4
    looked_up = IntegerWeight(pack_nibbles(codes), torch.tensor([[2.0]]), 4, 3, codebook=book)
    assert dequantize(looked_up).tolist() == [[7.0, 6.5, 6.0]]


@pytest.mark.parametrize(("group_rows", "group_size"), [(0, 0), (1, 0), (4, 16)])
def test_fp8_values_have_the_scale_of_their_block(group_rows: int, group_size: int) -> None:
    values = torch.randn(6, 40).to(torch.float8_e4m3fn)
    shape = (-(-6 // (group_rows or 6)), -(-40 // (group_size or 40)))
    scales = torch.rand(shape)
    actual = dequantize(ScaledFp8Weight(values, scales, group_rows, group_size))
    for n in (0, 3, 4, 5):
        for k in (0, 15, 16, 39):
            scale = scales[n // (group_rows or 6), k // (group_size or 40)]
            assert actual[n, k] == values[n, k].float() * scale


def test_weights_in_different_groups_bits_and_offsets_lie_in_one_layer() -> None:
    parts = [
        make_integers(4, 40, seed=1),
        make_integers(3, 40, 4, 32, has_offsets=True, seed=2),
        make_integers(2, 40, 8, 0, seed=3),
    ]
    stacked = stack_weights(["a", "b", "c"], list(parts))
    assert isinstance(stacked, IntegerWeight)
    assert (stacked.bits, stacked.group_size) == (8, 16)
    torch.testing.assert_close(dequantize(stacked), torch.cat([dequantize(each) for each in parts]))
    blocks = [ScaledFp8Weight(torch.randn(20, 40).to(torch.float8_e4m3fn), torch.rand(2, 3), 16, 16)] * 2
    assert torch.equal(
        dequantize(stack_weights(["a", "b"], list(blocks))), torch.cat([dequantize(blocks[0])] * 2)
    )


def test_weights_that_cannot_lie_in_one_layer_are_named() -> None:
    one = make_integers()
    turned = replace(one, permutation=torch.arange(40, dtype=torch.int32).flip(0))
    with pytest.raises(ModelError, match="k_proj permutation"):
        stack_weights(["q_proj", "k_proj"], [one, turned])
    fp8 = ScaledFp8Weight(torch.randn(6, 40).to(torch.float8_e4m3fn), torch.rand(1, 1), 0, 0)
    with pytest.raises(ModelError, match=r"k_proj.*IntegerWeight, as q_proj"):
        stack_weights(["q_proj", "k_proj"], [one, fp8])


def test_a_reader_that_makes_another_shape_is_refused() -> None:
    weight, form = make_integers(), WeightFormat(bits=4, group_size=16)
    check_weight("w", weight, form, 6, 40)
    for wrong, num_in in [
        (replace(weight, scales=weight.scales[:, 1:]), 40),
        (replace(weight, codes=weight.codes[:, 1:]), 40),
        (replace(weight, permutation=torch.zeros(40, dtype=torch.int32)), 40),
        (weight, 41),
    ]:
        with pytest.raises(ModelError, match=r"^w"):
            check_weight("w", wrong, form, 6, num_in)


def test_a_format_knows_its_bytes_before_anything_is_read() -> None:
    assert WeightFormat(bits=4, group_size=64, scale_dtype="bfloat16").count_bytes(10, 128) == 10 * (
        64 + 2 * 2
    )
    assert WeightFormat(bits=8, has_offsets=True).count_bytes(10, 128) == 10 * (128 + 8)
    with pytest.raises(ConfigError, match="group_size=24: expected a multiple of 16"):
        WeightFormat(group_size=24)


def test_a_layers_format_is_the_models_or_its_own() -> None:
    formats = make_online_formats("int4", "int8")
    assert formats.find("model.layers.0.mlp.up_proj") == WeightFormat(
        bits=4, group_size=64, scale_dtype="bfloat16"
    )
    assert formats.find("lm_head") == WeightFormat(bits=8)
    assert make_online_formats("int4", "none").find("lm_head") is None
    assert WeightFormats().find("lm_head") is None


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_fp8_numbers_that_are_none_are_refused_by_the_layer(code: int) -> None:
    codes = torch.tensor([[0x7E, 0xFE, 0x00, 0x80] * 4] * 3, dtype=torch.uint8)
    weight = ScaledFp8Weight(codes.view(torch.float8_e4m3fn), torch.ones(3, 1))
    format = WeightFormat(kind="fp8", layout="fp8")
    check_weight("layers.3.up", weight, format, 3, 16)
    codes[2, 7] = code
    with pytest.raises(
        ModelError, match=r"layers\.3\.up values='nan': expected float8_e4m3fn numbers from -448 to 448"
    ):
        check_weight("layers.3.up", weight, format, 3, 16)
