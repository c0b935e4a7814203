"""GgufSource: a model's tensors out of GGUF files, where the frontend has found them by the files' headers.

The files are memory-mapped and read tensor by tensor. A quantized tensor that is asked for as numbers, such
as a table of embeddings, is made a few rows at a time, so that the whole of it is never there in float32.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from msgspec.structs import replace
from torch import Tensor

from ..ipc.config import ModelConfig
from ..ipc.errors import ModelError
from ..ipc.gguf_tensor import GgufTensor
from ..ipc.weight_format import WeightFormat
from .quantization.gguf_blocks import make_numbers, read_blocks
from .quantization.integer_weight import IntegerWeight
from .weights import WHOLE, Cut, WeightSource

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CHUNK_BYTES = 1 << 20  # of stored rows that become numbers at once


class GgufSource(WeightSource):
    """The tensors of `model.gguf_tensors`. Raises ModelError when a file is not as long as they need."""

    def __init__(self, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._files = model.weight_files
        self._dtype, self._device = dtype, device
        self._maps = [_map_file(Path(model.model, name)) for name in model.weight_files]
        self._tensors = {tensor.name: tensor for each in model.gguf_tensors for tensor in _unstack(each)}
        unused = model.spec.unused_tensors
        self._left = {name for name in self._tensors if not name.startswith(unused)}

    def take_stacked(
        self, names: Sequence[str], sizes: Sequence[int], width: int | None = None, cut: Cut = WHOLE
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
            stored = self._read_rows(tensors[index])[rows.start : rows.stop]
            for part in stored.split(max(1, _CHUNK_BYTES // stored.shape[1])):
                numbers = _make_numbers(part, tensors[index])
                out[first : first + len(part)] = numbers[:, 0] if width is None else numbers[:, columns]
                first += len(part)
        return out

    def take_narrow(self, name: str, format: WeightFormat, shape: tuple[int, int]) -> IntegerWeight:
        tensor = self._find(f"{name}.weight", shape)
        assert tensor.type not in _FLOATS, format  # the frontend has read the same table
        return read_blocks(self._read_rows(tensor), tensor.type)

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
        place = {"name": tensor.name.format(index), "offset": tensor.offset + index * size_bytes}
        yield replace(tensor, shape=tuple(shape), **place)


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:  # a private mapping, which torch takes without a warning
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:  # ValueError: it is empty
        raise ModelError("model", str(path), f"a GGUF file that can be read ({error})") from error
