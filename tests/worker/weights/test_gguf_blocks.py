"""Blocks of GGUF files against the numbers of llama.cpp's own package (make_gguf_blocks.py), bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from quire.ipc.spec.gguf_tensor import BLOCKS
from quire.worker.weights.gguf import make_numbers, read_blocks
from quire.worker.weights.integer_weight import dequantize, unpack_codes
from safetensors.torch import load_file

GOLDEN = Path(__file__).with_name("gguf_blocks.safetensors")
QUANTIZED = [name for name, (numbers, _) in BLOCKS.items() if numbers > 1]


@pytest.mark.parametrize("type_", QUANTIZED)
def test_numbers_are_those_of_the_library_bit_for_bit(type_: Any):
    golden = load_file(GOLDEN)
    expected = (golden[f"{type_} numbers"] + 0.0).view(torch.int32)  # -0 of MXFP4's codes is 0
    for numbers in (dequantize(read_blocks(golden[type_], type_)), make_numbers(golden[type_], type_)):
        assert torch.equal((numbers + 0.0).view(torch.int32), expected)


@pytest.mark.parametrize(
    ("type_", "bits", "group_size", "has_offsets"),
    [
        ("Q8_0", 8, 32, False),
        ("Q4_0", 4, 32, False),
        ("Q4_1", 4, 32, True),
        ("Q5_0", 8, 32, False),
        ("Q5_1", 8, 32, True),
        ("Q4_K", 4, 32, True),
        ("Q5_K", 8, 32, True),
        ("Q6_K", 8, 16, False),
        ("Q2_K", 4, 16, True),
        ("Q3_K", 4, 16, False),
        ("IQ4_NL", 8, 32, False),
        ("IQ4_XS", 8, 32, False),
        ("MXFP4", 4, 32, False),
    ],
)
def test_a_type_has_its_form(type_: Any, bits: int, group_size: int, has_offsets: bool):
    weight = read_blocks(torch.zeros(2, BLOCKS[type_][1] * 2, dtype=torch.uint8), type_)
    assert (weight.bits, weight.group_size, weight.offsets is not None) == (bits, group_size, has_offsets)
    assert unpack_codes(weight).shape == (2, 2 * BLOCKS[type_][0])
    assert weight.scales.shape == (2, 2 * BLOCKS[type_][0] // group_size)
