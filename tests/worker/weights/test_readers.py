"""Readers against files that the formats' own libraries made: the same bits in float32."""

from __future__ import annotations

import math

import pytest
import torch
from golden_weights import FOLDER, GOLDEN_NAMES, GoldenWeight, load_golden
from quire.ipc.errors import ModelError
from quire.ipc.spec.weight_format import WeightFormat
from quire.worker.weights.compressed_tensors import make_mxfp4_weight
from quire.worker.weights.integer_weight import check_weight, dequantize
from quire.worker.weights.packed_bits import count_words, sort_by_group, unpack_words
from quire.worker.weights.readers import read_weight

# The library rounds code * largest, then that * 1/127; here largest * 1/127 is the scale: four roundings.
ROUNDINGS = {"bnb_int8": 4}


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_a_reader_gives_the_librarys_numbers(name: str) -> None:
    golden = GoldenWeight(name)
    weight = golden.read()
    check_weight("linear", weight, golden.format, *golden.shape)
    bound = ROUNDINGS.get(name, 0) * 2.0**-24
    torch.testing.assert_close(dequantize(weight), golden.expected, rtol=bound, atol=0)
    assert golden.unread == set()


def test_blocks_of_gpt_oss_are_the_librarys_numbers() -> None:
    tensors = load_golden("gpt_oss_blocks")
    scales = torch.exp2(tensors["linear.weight_scales"].float() - 127)
    weight = make_mxfp4_weight(tensors["linear.weight_blocks"].flatten(1), scales)
    assert torch.equal(dequantize(weight), tensors["expected"])


class Tensors:
    """A TensorFinder over a dict."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors, self.read = tensors, set[str]()

    def __call__(self, name: str, *, is_read: bool) -> torch.Tensor | None:
        self.read |= {name} if is_read else set()
        return self.tensors.get(name)


def read_fp8_layer(values: torch.Tensor, scale: torch.Tensor, block: int = 0) -> torch.Tensor:
    """The numbers of a layer as vLLM, fbgemm or DeepSeek store it."""
    part = "weight_scale_inv" if block else "weight_scale"
    find = Tensors({"l.weight": values, f"l.{part}": scale, "l.input_scale": torch.ones(1)})
    weight_format = WeightFormat(kind="fp8", group_rows=block or 1, group_size=block, layout="fp8")
    num_out, num_in = values.shape
    weight = read_weight(find, "l", weight_format, (num_out, num_in))
    assert find.read >= set(find.tensors)
    return dequantize(weight)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (8,), (8, 1)])
def test_scales_of_fp8_are_of_the_whole_weight_or_of_each_output(shape: tuple[int, ...]) -> None:
    values = torch.randn(8, 32, generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn)
    scale = torch.arange(1.0, math.prod(shape) + 1).reshape(shape)
    assert torch.equal(read_fp8_layer(values, scale), values.float() * scale.reshape(-1, 1))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_scales_of_fp8_blocks_may_be_exponents(dtype: torch.dtype) -> None:
    values = torch.ones(16, 32).to(torch.float8_e4m3fn)
    scale = torch.tensor([[127, 130]], dtype=torch.uint8).view(dtype)
    expected = torch.cat([torch.full((16, 16), 1.0), torch.full((16, 16), 8.0)], 1)
    assert torch.equal(read_fp8_layer(values, scale, 16), expected)
    with pytest.raises(ModelError, match=r"l\.weight_scale_inv.*nan"):
        read_fp8_layer(values, torch.tensor([[127, 255]], dtype=torch.uint8).view(dtype), 16)


PACKED_4 = WeightFormat(bits=4, group_size=16, layout="pack-quantized/4")


def read_packed_layer(format: WeightFormat, num_groups: int = 2, **parts: torch.Tensor) -> torch.Tensor:
    """Of [8, 32] codes of 4 bits, each 15."""
    codes = torch.full((8, 4), -1, dtype=torch.int32)
    tensors = {"weight_packed": codes, "weight_scale": torch.ones(8, num_groups), **parts}
    find = Tensors({f"l.{part}": tensor for part, tensor in tensors.items()})
    weight = read_weight(find, "l", format, (8, 32))
    assert find.read >= set(find.tensors)
    return dequantize(weight)


def test_a_whole_weights_zero_is_not_packed() -> None:
    weight_format = WeightFormat(bits=4, has_offsets=True, layout="pack-quantized/4")
    point = torch.tensor([3], dtype=torch.int8)
    numbers = read_packed_layer(weight_format, 1, weight_zero_point=point)
    assert torch.equal(numbers, torch.full((8, 32), 7.0 - 3.0))
    with pytest.raises(ModelError, match=r"l\.weight_zero_point=None: expected a tensor"):
        read_packed_layer(weight_format, 1)


@pytest.mark.parametrize("layout", ["pack-quantized/4", "int-quantized"])
def test_symmetric_weights_may_keep_zeros_but_none_that_counts(layout: str) -> None:
    zeros = torch.zeros(8, 2, dtype=torch.int8)
    if layout == "int-quantized":
        values = torch.ones(8, 32, dtype=torch.int8)
        find = Tensors({"l.weight": values, "l.weight_scale": torch.ones(8, 2), "l.weight_zero_point": zeros})
        weight_format = WeightFormat(group_size=16, layout=layout)
        assert torch.equal(dequantize(read_weight(find, "l", weight_format, (8, 32))), values.float())
        zeros[7, 1] = 1
        with pytest.raises(
            ModelError, match=r"l\.weight_zero_point='another zero': expected 0 as symmetric=true"
        ):
            read_weight(find, "l", weight_format, (8, 32))
        return
    packed = torch.full((1, 2), -0x77777778, dtype=torch.int32)  # 0 in each of 8 codes
    for neutral in (zeros, packed):
        assert read_packed_layer(PACKED_4, weight_zero_point=neutral).eq(7).all()
    for other in (zeros + 1, packed + 1):
        with pytest.raises(
            ModelError, match=r"l\.weight_zero_point='another zero': expected 0 as symmetric=true"
        ):
            read_packed_layer(PACKED_4, weight_zero_point=other)


def test_an_order_of_inputs_that_config_json_does_not_name_is_refused() -> None:
    order = torch.arange(32, dtype=torch.int32)
    for neutral in (order // 16, order * 0 - 1):
        assert read_packed_layer(PACKED_4, weight_g_idx=neutral).eq(7).all()
    with pytest.raises(ModelError, match=r"l\.weight_g_idx='not in order'"):
        read_packed_layer(PACKED_4, weight_g_idx=order % 2)


@pytest.mark.parametrize("number", [0, 2])
def test_int8_of_bitsandbytes_is_read_row_by_row_alone(number: int) -> None:
    parts = {"l.weight": torch.ones(8, 32).char(), "l.SCB": torch.ones(8)}
    find = Tensors({**parts, "l.weight_format": torch.tensor(number).byte()})
    if number == 0:
        numbers = dequantize(read_weight(find, "l", WeightFormat(layout="bnb-int8"), (8, 32)))
        assert torch.allclose(numbers, torch.tensor(1 / 127))
        assert find.read >= set(find.tensors)
        return
    with pytest.raises(ModelError, match=r"l\.weight_format=2: expected 0, row by row"):
        read_weight(find, "l", WeightFormat(layout="bnb-int8"), (8, 32))


def test_a_layout_that_nobody_reads_is_named() -> None:
    with pytest.raises(ModelError, match=r"l layout='other'.*gptq"):
        read_weight(Tensors({}), "l", WeightFormat(layout="other"), (8, 16))


def test_golden_files_stay_small() -> None:
    assert all(path.stat().st_size < 100_000 for path in FOLDER.iterdir())


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("count", [8, 40, 67])
def test_numbers_of_any_bits_come_out_of_words(bits: int, count: int) -> None:
    numbers = torch.randint(0, 1 << bits, (3, count), generator=torch.Generator().manual_seed(bits))
    rows = [sum(int(number) << bits * place for place, number in enumerate(row)) for row in numbers]
    num_bytes = 4 * count_words(count, bits)
    words = torch.stack(
        [torch.frombuffer(bytearray(row.to_bytes(num_bytes, "little")), dtype=torch.int32) for row in rows]
    )
    assert torch.equal(unpack_words(words, bits, count).long(), numbers)


def test_inputs_are_sorted_by_group_and_a_group_of_another_size_is_refused() -> None:
    assert sort_by_group(torch.tensor([0, 0, 1, 1, 2]), 2) is None
    order = sort_by_group(torch.tensor([1, 0, 2, 0, 1]), 2)
    assert order is not None
    assert order.tolist() == [1, 3, 0, 4, 2]
    for groups in ([0, 0, 0, 1, 2], [0, 0, 1, 1, 3], [-1, 0, 1, 1, 2]):
        with pytest.raises(ValueError, match="2 inputs of each group from 0 to 2"):
            sort_by_group(torch.tensor(groups), 2)
