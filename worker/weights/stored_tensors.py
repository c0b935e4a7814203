"""StoredTensors: the tensors that a checkpoint keeps of one linear layer, each checked when it is taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ...ipc.errors import ModelError

MAX_TEXT_BYTES = 1 << 16  # the JSON that bitsandbytes keeps of a layer has a few hundred


class TensorFinder(Protocol):
    """The tensors of files."""

    def __call__(self, name: str, *, is_read: bool) -> Tensor | None:
        """A view of the tensor, None where there is none; `is_read` says if it then counts as read."""
        ...


_MAX_SCALE = 1e18  # that of a product of two with a code is finite in float32
_SCALE_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class StoredTensors:
    """What belongs to the layer `name`: tensors are asked for by what follows that."""

    def __init__(self, find: TensorFinder, name: str) -> None:
        self._find = find
        self._name = name

    def take(self, part: str, dtypes: Sequence[torch.dtype], *shapes: Sequence[int]) -> Tensor:
        """The tensor, of one of the types and shapes. ModelError where it is another or missing."""
        tensor = self.find(part, dtypes, *shapes)
        if tensor is None:
            raise self.error(part, None, "a tensor, which the layer's format in config.json calls for")
        return tensor

    def find(self, part: str, dtypes: Sequence[torch.dtype], *shapes: Sequence[int]) -> Tensor | None:
        """As `take`, None where it is missing."""
        tensor = self._find(self._full(part), is_read=True)
        if tensor is None:
            return None
        if tensor.dtype not in dtypes:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise self.error(part, str(tensor.dtype).removeprefix("torch."), f"{names} in this format")
        if tuple(tensor.shape) not in [tuple(shape) for shape in shapes]:
            allowed = " or ".join(str(list(shape)) for shape in shapes)
            raise self.error(part, list(tensor.shape), f"the shape {allowed} by config.json")
        return tensor

    def peek(self, part: str, dtypes: Sequence[torch.dtype], *shapes: Sequence[int]) -> Tensor | None:
        """The tensor if it is of these types and shapes; it does not count as read."""
        tensor = self._find(self._full(part), is_read=False)
        is_one = tensor is not None and tensor.dtype in dtypes and tuple(tensor.shape) in map(tuple, shapes)
        return tensor if is_one else None

    def has(self, part: str) -> bool:
        """Whether there is one, of any type and shape; it does not count as read."""
        return self._find(self._full(part), is_read=False) is not None

    def take_bytes(self, part: str, dtypes: Sequence[torch.dtype], size: int) -> Tensor:
        """uint8 [size] of a tensor [n, 1] of any of the types."""
        shapes = [(size // dtype.itemsize, 1) for dtype in dtypes]
        tensor = self.take(part, dtypes, *shapes).contiguous().view(torch.uint8).flatten()
        if len(tensor) != size:
            raise self.error(part, len(tensor), f"{size} bytes by config.json")
        return tensor

    def take_text(self, part: str) -> bytes:
        """The bytes of a vector of uint8, at most MAX_TEXT_BYTES."""
        tensor = self._find(self._full(part), is_read=True)
        if tensor is None:
            raise self.error(part, None, "a tensor, which the layer's format in config.json calls for")
        if tensor.dtype != torch.uint8 or tensor.dim() != 1 or len(tensor) > MAX_TEXT_BYTES:
            raise self.error(part, f"{tensor.dtype} {list(tensor.shape)}", f"at most {MAX_TEXT_BYTES} uint8")
        return bytes(tensor.tolist())

    def take_scales(self, part: str, *shapes: Sequence[int]) -> Tensor:
        """Numbers in float32 of which none is nan or too large for a product of two."""
        return self.check_scales(part, self.take(part, _SCALE_TYPES, *shapes).float())

    def take_grid(self, part: str, grid: tuple[int, int]) -> Tensor:
        """Scales of the shape `grid`; of one column also one of each row, or one of all."""
        return spread(self.take_scales(part, *grid_shapes(grid)), grid)

    def check_scales(self, part: str, scales: Tensor) -> Tensor:
        """Return `scales`, if all are finite and not too large. Raises ModelError."""
        if not bool((scales.abs() <= _MAX_SCALE).all()):  # of nan it is false
            raise self.error(part, "inf, nan or too large", f"numbers up to {_MAX_SCALE:g}")
        return scales

    def read_exponents(self, part: str, exponents: Tensor) -> Tensor:
        """2^(e - 127) in float32 of uint8, or of float8_e8m0fnu, which is the same."""
        return self.check_scales(
            part, torch.exp2(exponents.contiguous().view(torch.uint8).double() - 127).float()
        )

    def skip(self, *parts: str) -> None:
        """Count tensors as read that the computation does without, such as scales of activations."""
        for part in parts:
            self._find(self._full(part), is_read=True)

    def error(self, part: str, value: object, allowed: str) -> ModelError:
        """What to raise for a tensor."""
        return ModelError(self._full(part), value, allowed)

    def _full(self, part: str) -> str:
        return f"{self._name}.{part}"


def grid_shapes(grid: tuple[int, int]) -> list[Sequence[int]]:
    """How numbers of so many rows and columns may be stored."""
    whole: list[Sequence[int]] = [grid[:1], (1, 1), (1,), ()] if grid[1] == 1 else []
    return [grid, *whole]


def spread(numbers: Tensor, grid: tuple[int, int]) -> Tensor:
    """The numbers of one of `grid_shapes`, spread over `grid`."""
    return numbers.reshape(-1, grid[1]).expand(grid).contiguous()
