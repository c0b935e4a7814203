"""GgufSource: a model's tensors out of GGUF files, where the frontend has found them by the files' headers.

The files are memory-mapped and read tensor by tensor. A quantized tensor that is asked for as numbers, such
as a table of embeddings, is made a few rows at a time, so that the whole of it is never there in float32.

Blocks of ggml's quantized types stand for the same numbers as the IntegerWeights made of them, bit for bit. A
block's scale is a float16, times a number of 4 to 8 bits in the types of superblocks; such products, and
those with a code, are exact in float32. Layouts: ggml-common.h; the judge is llama.cpp's own `gguf` package.
Legend: N outputs, B blocks of an output, bytes are little-endian, nibble 0 is bits 0-3.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from msgspec.structs import replace
from torch import Tensor

from ...ipc.errors import ModelError
from ...ipc.spec.config import ModelConfig
from ...ipc.spec.gguf_tensor import BLOCKS, FUSED, HALVES, GgmlType, GgufTensor
from ...ipc.spec.weight_format import WeightFormat
from .compressed_tensors import MXFP4_NUMBERS
from .finite import check_finite
from .integer_weight import IntegerWeight, pack_nibbles
from .weights import WHOLE, TensorSlice, WeightSource

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CHUNK_BYTES = 1 << 20  # of stored rows that become numbers at once
_PAIR_PLACES = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)  # of a byte's four numbers of two bits
_IQ4_NUMBERS = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
_IQ4_CODES = (_IQ4_NUMBERS + 128).to(torch.uint8)


class GgufSource(WeightSource):
    """The tensors of `model.gguf_tensors`. Raises ModelError when a file is not as long as they need."""

    def __init__(self, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._files = model.weight_files
        self._dtype, self._device = dtype, device
        self._maps = [_map_file(Path(model.model, name)) for name in model.weight_files]
        self._tensors = {tensor.name: tensor for each in model.gguf_tensors for tensor in _unstack(each)}
        unused = model.spec.unused_tensors
        self._left = {name for name in self._tensors if not name.startswith(unused)}

    def _read_stacked(
        self, names: Sequence[str], sizes: Sequence[int], width: int | None, cut: TensorSlice
    ) -> Tensor:
        tail = () if width is None else (width,)
        tensors = [self._find(name, (size, *tail)) for name, size in zip(names, sizes, strict=True)]
        pieces = cut.find_runs(sizes)
        columns = slice(None) if cut.columns is None else slice(cut.columns.start, cut.columns.stop)
        shape = () if width is None else (len(range(width)[columns]),)
        num_rows = sum(len(rows) for _, rows in pieces)
        out = torch.empty((num_rows, *shape), dtype=self._dtype, device=self._device)
        first = 0
        for index, rows in pieces:
            stored = self._read_rows(tensors[index])[rows.start : rows.stop : rows.step]
            for part in stored.split(max(1, _CHUNK_BYTES // stored.shape[1])):
                numbers = _make_numbers(part, tensors[index])
                out[first : first + len(part)] = numbers[:, 0] if width is None else numbers[:, columns]
                first += len(part)
        return out

    def take_narrow(self, name: str, format: WeightFormat, shape: tuple[int, int]) -> IntegerWeight:
        tensor = self._find(f"{name}.weight", shape)
        assert tensor.type not in _FLOATS, format  # the frontend has read the same table
        return read_blocks(self._read_rows(tensor), tensor.type)

    def take_floats(self, name: str, count: int) -> Tensor:
        tensor = self._find(name, (count,))
        numbers = _make_numbers(self._read_rows(tensor), tensor)[:, 0].float().to(self._device)
        return check_finite(name, numbers)

    def take_kernel(self, name: str, num_channels: int, size: int, cut: TensorSlice = WHOLE) -> Tensor:
        tensor = self._find(name, (num_channels, size))
        rows = torch.cat(cut.find_pieces([self._read_rows(tensor)]))
        return _make_numbers(rows, tensor).float().to(self._device)

    def holds(self, name: str) -> bool:
        return name in self._tensors

    def skip(self, name: str) -> None:
        self._left.discard(name)

    def finish(self) -> None:
        self._maps.clear()
        if self._left:
            text = (
                f"{len(self._left)} tensors that this architecture does not have, such as {min(self._left)}"
            )
            raise ModelError("model", ", ".join(self._files), f"a file without {text}")

    def _find(self, name: str, shape: tuple[int, ...]) -> GgufTensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelError("model", ", ".join(self._files), f"its weights must hold the tensor {name!r}")
        self._left.discard(name)
        if tensor.shape != shape:
            allowed = f"the shape {list(shape)}, which the file's metadata call for"
            raise ModelError(name, list(tensor.shape), allowed)
        return tensor

    def _read_rows(self, tensor: GgufTensor) -> Tensor:
        """uint8 [rows, bytes of a row] in the model's order, a view of the file where that is the file's."""
        size, place = tensor.size_bytes, self._maps[tensor.file]
        if tensor.offset + size > len(place):
            name = self._files[tensor.file]
            allowed = f"{tensor.offset + size} bytes, as when its header was read; it has {len(place)}"
            raise ModelError("model", name, allowed)
        data = torch.frombuffer(place, dtype=torch.uint8, count=size, offset=tensor.offset)
        rows = data.view(tensor.shape[0], -1)
        if not tensor.num_paired_heads:
            return rows
        return rows.view(tensor.num_paired_heads, -1, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def _make_numbers(rows: Tensor, tensor: GgufTensor) -> Tensor:
    """The numbers of some of a tensor's rows; a vector's rows have one."""
    dtype = _FLOATS.get(tensor.type)
    numbers = make_numbers(rows, tensor.type) if dtype is None else rows.contiguous().view(dtype)
    return numbers.float() - 1 if tensor.has_added_one else numbers


def _unstack(tensor: GgufTensor) -> Iterator[GgufTensor]:
    """Its parts, of a tensor that is stacked over experts."""
    if "{}" not in tensor.name:
        yield tensor
        return
    count, *shape = tensor.shape
    size_bytes = tensor.size_bytes // count
    for index in range(count):
        name, offset = tensor.name.format(index), tensor.offset + index * size_bytes
        if not name.endswith(f"{FUSED}.weight"):
            yield replace(tensor, shape=tuple(shape), name=name, offset=offset)
            continue
        half = (shape[0] // 2, *shape[1:])
        for number, part in enumerate(HALVES):
            part_name, place = name.replace(FUSED, part), offset + number * (size_bytes // 2)
            yield replace(tensor, shape=half, name=part_name, offset=place)


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:  # a private mapping, which torch takes without a warning
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:  # ValueError: it is empty
        raise ModelError("model", str(path), f"a GGUF file that can be read ({error})") from error


_Parts = tuple[
    Tensor, Tensor, Tensor | None, int
]  # codes [N, B, numbers], scales [N, B, groups], offsets, bits


def read_blocks(data: Tensor, type_: GgmlType) -> IntegerWeight:
    """The weight of rows of blocks, uint8 [N, bytes of a row], of a quantized type."""
    numbers, size_bytes = BLOCKS[type_]
    blocks = data.view(len(data), -1, size_bytes)
    codes, scales, offsets, bits = _READERS[type_](blocks)
    codes = codes.flatten(1)
    return IntegerWeight(
        codes=codes if bits == 8 else pack_nibbles(codes),
        scales=scales.flatten(1),
        bits=bits,
        num_in=codes.shape[1],
        group_size=numbers // scales.shape[2],
        offsets=None if offsets is None else offsets.flatten(1),
        codebook=MXFP4_NUMBERS if type_ == "MXFP4" else None,
    )


def make_numbers(data: Tensor, type_: GgmlType) -> Tensor:
    """float32 [N, K] of such rows: products are exact, so it rounds as the reference dequantizer does."""
    codes, scales, offsets, bits = _READERS[type_](data.view(len(data), -1, BLOCKS[type_][1]))
    numbers = MXFP4_NUMBERS[codes.int()] if type_ == "MXFP4" else codes.float()
    groups = numbers.view(*scales.shape, -1)
    if offsets is None and type_ != "MXFP4":
        groups -= 1 << bits - 1
    groups *= scales.unsqueeze(3)
    if offsets is not None:
        groups -= offsets.unsqueeze(3)
    return numbers.flatten(1)


def _halves(blocks: Tensor, start: int, count: int = 1) -> Tensor:
    """float32 [N, B, count] of the float16 numbers at a byte."""
    return blocks[:, :, start : start + 2 * count].contiguous().view(torch.float16).float()


def _nibbles(data: Tensor, run: int) -> Tensor:
    """uint8 of bytes [N, B, n]: of each run of them the low nibbles, then the high ones."""
    runs = data.unflatten(2, (-1, 1, run))
    return torch.cat((runs & 15, runs >> 4), 3).flatten(2)


def _fifth_bits(data: Tensor) -> Tensor:
    """uint8 [N, B, 32]: the bits of 4 bytes, as 16 of their places."""
    places = torch.arange(8, dtype=torch.uint8)
    return (data.unsqueeze(3) >> places & 1).flatten(2) << 4


def _bit_pairs(data: Tensor) -> Tensor:
    """uint8 [N, B, 4 n] of bytes [N, B, n]: of each 32 of them the lowest two bits, then the next."""
    return (data.unflatten(2, (-1, 1, 32)) >> _PAIR_PLACES.unsqueeze(1) & 3).flatten(2)


def _single_bits(data: Tensor) -> Tensor:
    """uint8 [N, B, 256] of bytes [N, B, 32]: bit j of byte l is that of number 32 j + l."""
    return (data.unsqueeze(2) >> torch.arange(8, dtype=torch.uint8).unsqueeze(1) & 1).flatten(2)


def _read_q8_0(blocks: Tensor) -> _Parts:
    return blocks[:, :, 2:] ^ 128, _halves(blocks, 0), None, 8


def _read_q4_0(blocks: Tensor) -> _Parts:
    return _nibbles(blocks[:, :, 2:], 16), _halves(blocks, 0), None, 4


def _read_q4_1(blocks: Tensor) -> _Parts:
    return _nibbles(blocks[:, :, 4:], 16), _halves(blocks, 0), -_halves(blocks, 2), 4


def _read_q5_0(blocks: Tensor) -> _Parts:
    codes = _nibbles(blocks[:, :, 6:], 16) | _fifth_bits(blocks[:, :, 2:6])
    return codes + (128 - 16), _halves(blocks, 0), None, 8


def _read_q5_1(blocks: Tensor) -> _Parts:
    codes = _nibbles(blocks[:, :, 8:], 16) | _fifth_bits(blocks[:, :, 4:8])
    return codes, _halves(blocks, 0), -_halves(blocks, 2), 8


def _read_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [N, B, 8] scales and offsets of Q4_K and Q5_K: 6 bits each, in 12 bytes, times two float16."""
    low, middle, high = blocks[:, :, 4:16].split(4, 2)
    scales = torch.cat((low & 63, high & 15 | low >> 2 & 48), 2)
    offsets = torch.cat((middle & 63, high >> 4 | middle >> 2 & 48), 2)
    return _halves(blocks, 0) * scales.float(), _halves(blocks, 2) * offsets.float()


def _read_q2_k(blocks: Tensor) -> _Parts:
    low, high = blocks[:, :, :16] & 15, blocks[:, :, :16] >> 4
    scales, offsets = _halves(blocks, 80) * low.float(), _halves(blocks, 82) * high.float()
    return _bit_pairs(blocks[:, :, 16:80]), scales, offsets, 4


def _read_q3_k(blocks: Tensor) -> _Parts:
    codes = _bit_pairs(blocks[:, :, 32:96]) | _single_bits(blocks[:, :, :32]) << 2
    high = (blocks[:, :, None, 104:108] >> _PAIR_PLACES.unsqueeze(1) & 3).flatten(2)
    scales = (_nibbles(blocks[:, :, 96:104], 8) | high << 4).float() - 32
    return codes + (8 - 4), _halves(blocks, 108) * scales, None, 4


def _read_q4_k(blocks: Tensor) -> _Parts:
    return _nibbles(blocks[:, :, 16:], 32), *_read_scales(blocks), 4


def _read_q5_k(blocks: Tensor) -> _Parts:
    fifth = _single_bits(blocks[:, :, 16:48]) << 4
    return _nibbles(blocks[:, :, 48:], 32) | fifth, *_read_scales(blocks), 8


def _read_q6_k(blocks: Tensor) -> _Parts:
    codes = _nibbles(blocks[:, :, :128], 64) | _bit_pairs(blocks[:, :, 128:192]) << 4
    scales = blocks[:, :, 192:208].contiguous().view(torch.int8).float()
    return codes + (128 - 32), _halves(blocks, 208) * scales, None, 8


def _read_iq4_nl(blocks: Tensor) -> _Parts:
    return _look_up(blocks[:, :, 2:]), _halves(blocks, 0), None, 8


def _read_iq4_xs(blocks: Tensor) -> _Parts:
    high = (blocks[:, :, 2:4].unsqueeze(3) >> _PAIR_PLACES & 3).flatten(2)
    scales = (_nibbles(blocks[:, :, 4:8], 1) | high << 4).float() - 32
    return _look_up(blocks[:, :, 8:]), _halves(blocks, 0) * scales, None, 8


def _read_mxfp4(blocks: Tensor) -> _Parts:
    return _nibbles(blocks[:, :, 1:], 16), torch.exp2(blocks[:, :, :1].double() - 127).bfloat16(), None, 4


def _look_up(data: Tensor) -> Tensor:
    """Codes of 8 bits of what the nibbles of the IQ4 types stand for."""
    return _IQ4_CODES[_nibbles(data, 16).int()]


_READERS: dict[GgmlType, Callable[[Tensor], _Parts]] = {
    "Q8_0": _read_q8_0,
    "Q4_0": _read_q4_0,
    "Q4_1": _read_q4_1,
    "Q5_0": _read_q5_0,
    "Q5_1": _read_q5_1,
    "Q2_K": _read_q2_k,
    "Q3_K": _read_q3_k,
    "Q4_K": _read_q4_k,
    "Q5_K": _read_q5_k,
    "Q6_K": _read_q6_k,
    "IQ4_NL": _read_iq4_nl,
    "IQ4_XS": _read_iq4_xs,
    "MXFP4": _read_mxfp4,
}
