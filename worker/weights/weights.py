"""Where a model's tensors come from: safetensors files, or random numbers.

A model asks for each tensor by name and shape and so states what it needs; a source knows nothing of
models. The frontend has found the files and checked their headers. They are memory-mapped and read tensor by
tensor, so that no second copy of the weights exists. Only safetensors is read: it holds numbers and no code.
A rank of several takes a `TensorSlice` of a tensor, and nothing else of the file is copied.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...ipc.errors import ModelError
from ...ipc.spec.model_spec import AttentionSpec, ExpertsSpec, RopeConfig, list_stored_names, rename_stored
from ...ipc.spec.recurrent_spec import DeltaNetSpec
from ...ipc.spec.weight_format import WeightFormat
from ..steps.staging import StagingRing
from .finite import check_finite, is_finite
from .integer_weight import IntegerWeight, NarrowWeight, ScaledFp8Weight
from .readers import read_weight


@dataclass(frozen=True, slots=True)
class RankCuts:
    """Which part of each weight a rank of a tensor parallel group has.

    Projections with whose results each rank goes on alone (queries, keys, values, gate, up), and that to
    logits, are cut by outputs, rows of the weight; those that follow (attention's output, down) are cut by
    inputs, its columns: what they give are terms of a sum. Sizes are the whole model's, which `size` divides;
    if it is 1, all is WHOLE.
    """

    rank: int = 0
    size: int = 1

    def take_columns(self, count: int) -> TensorSlice:
        """Its share of `count` inputs."""
        return WHOLE if self.size == 1 else TensorSlice(columns=self._share(count))

    def take_rows(self, *counts: int) -> TensorSlice:
        """Its share of each of several projections, with so many outputs, that lie one after the other."""
        starts = [sum(counts[:index]) for index in range(len(counts))]
        pairs = zip(counts, starts, strict=True)
        return self._rows(*(_shift(self._share(count), start) for count, start in pairs))

    def take_parts(self, *parts: tuple[int, bool]) -> TensorSlice:
        """The same where not all are cut: of (outputs, whether ranks share them)."""
        starts = [sum(count for count, _ in parts[:index]) for index in range(len(parts))]
        rows = [self._share(count) if is_cut else range(count) for count, is_cut in parts]
        return self._rows(*map(_shift, rows, starts))

    def take_heads(self, spec: AttentionSpec, order: HeadOrder | None = None) -> TensorSlice:
        """Its heads of queries, and those of keys and values that they need.

        `order` is that of each query's and key's numbers; scores are sums over a head, so it changes none.
        """
        keys, first = self._keys(spec) if spec.kv_layer is None else [], spec.query_size
        queries = self._share(spec.query_size)
        if spec.has_gate:
            return self._take_gated_heads(spec, order or (range(spec.head_size),), keys)
        if spec.qkv_by_group:
            rotated, values = _find_groups(spec, queries, keys)
            order = order or (range(spec.head_size),)
        else:
            rotated = [queries, *(_shift(rows, first) for rows in keys)]
            values = [_shift(rows, first + spec.kv_size) for rows in keys]
        if order is None:
            return self._rows(*rotated, *values)
        return TensorSlice((*_order_heads(rotated, spec.head_size, order), *values))

    def _take_gated_heads(self, spec: AttentionSpec, order: HeadOrder, keys: list[range]) -> TensorSlice:
        """The same where each head of queries has its gate behind it; gates come last."""
        size, first = spec.head_size, spec.qkv_sizes[0]
        queries = [range(2 * size * head, 2 * size * head + size) for head in self._share(spec.num_heads)]
        rotated = [*queries, *(_shift(rows, first) for rows in keys)]
        values = [_shift(rows, first + spec.kv_size) for rows in keys]
        gates = [_shift(rows, size) for rows in queries]
        return TensorSlice((*_order_heads(rotated, size, order), *values, *gates))

    def take_delta_heads(self, spec: DeltaNetSpec) -> tuple[TensorSlice, TensorSlice, TensorSlice]:
        """Its heads of keys and values: of the projections to queries, keys, values and z in this order, of
        those to beta and decays, and of the convolution's channels.
        """
        keys, values, heads = spec.keys_size, spec.values_size, spec.num_value_heads
        group = heads // spec.num_key_heads
        wide = spec.key_size, spec.key_size, group * spec.value_size, group * spec.value_size
        return (
            self.take_rows(keys, keys, values, values)
            if len(spec.projections) > 1
            else self._gather_groups(spec, *wide),
            self.take_rows(heads, heads) if len(spec.gates) > 1 else self._gather_groups(spec, group, group),
            self.take_rows(keys, keys, values),
        )

    def _gather_groups(self, spec: DeltaNetSpec, *sizes: int) -> TensorSlice:
        """Of parts that lie side by side in each head of keys: the first of all its heads, and so on."""
        stride, heads = sum(sizes), self._share(spec.num_key_heads)
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        return TensorSlice(
            tuple(
                range(head * stride + start, head * stride + start + size)
                for start, size in zip(starts, sizes, strict=True)
                for head in heads
            )
        )

    def take_ordered_heads(self, num_heads: int, order: HeadOrder) -> TensorSlice:
        """Its share of heads, each with its numbers in this order."""
        size = sum(map(len, order))
        return TensorSlice(tuple(_order_heads([self._share(num_heads * size)], size, order)))

    def take_norm_heads(self, spec: AttentionSpec, order: HeadOrder | None = None) -> list[TensorSlice]:
        """Of the norms of all queries and of all keys."""
        each = [self._share(spec.query_size)], self._keys(spec)
        if order is None:
            return [self._rows(*rows) for rows in each]
        return [TensorSlice(tuple(_order_heads(rows, spec.head_size, order))) for rows in each]

    def is_first_of_keys(self, spec: AttentionSpec) -> bool:
        """Whether no rank before this one has its heads of keys."""
        return self.rank == 0 or self._keys(spec) != RankCuts(self.rank - 1, self.size)._keys(spec)

    def take_tokens(self, vocab_size: int) -> TensorSlice:
        """Its part of the vocabulary, which need not divide."""
        return self._rows(self._share(vocab_size))

    def _keys(self, spec: AttentionSpec) -> list[range]:
        heads, size = spec.find_rank_heads(self.rank, self.size), spec.head_size
        return [range(head * size, (head + 1) * size) for head in heads]

    def _share(self, count: int) -> range:
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def _rows(self, *rows: range) -> TensorSlice:
        return WHOLE if self.size == 1 else TensorSlice(rows)


def _shift(rows: range, by: int) -> range:
    return range(rows.start + by, rows.stop + by, rows.step)


HeadOrder = tuple[range, ...]  # the numbers of a head, run by run


def find_head_order(rope: RopeConfig, head_size: int) -> HeadOrder | None:
    """In which order kernels take a head's numbers: they turn pairs that are half a head apart.

    What is rotated and what is not then lie as halves of the head's halves. None: in the checkpoint's order.
    """
    size = rope.rotated_size or head_size
    if rope.type == "none" or (size == head_size and not rope.is_interleaved):
        return None
    rotated, rest = range(size), range(size, head_size)
    middle, middle_of_rest = size // 2, len(rest) // 2
    first, second = rotated[:middle], rotated[middle:]
    if rope.is_interleaved:
        first, second = rotated[::2], rotated[1::2]
    return first, rest[:middle_of_rest], second, rest[middle_of_rest:]


def _find_groups(
    spec: AttentionSpec, queries: range, keys: Sequence[range]
) -> tuple[list[range], list[range]]:
    """Where heads of queries and keys, and of values, lie that are stored by group."""
    size, group = spec.head_size, spec.num_heads // spec.num_kv_heads
    stride = (group + 2) * size
    heads = [start // size for start in queries[::size]]
    starts = [head // group * stride + head % group * size for head in heads]
    starts += [rows.start // size * stride + group * size for rows in keys]
    values = [rows.start // size * stride + (group + 1) * size for rows in keys]
    return [range(start, start + size) for start in starts], [range(start, start + size) for start in values]


def _order_heads(runs: Sequence[range], head_size: int, order: HeadOrder) -> Iterator[range]:
    for rows in runs:
        for start in range(rows.start, rows.stop, head_size):
            yield from (_shift(part, start) for part in order if part)


_FLOAT_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_CACHE_SCALES = ("q_scale", "k_scale", "v_scale", "kv_scale", "output_scale")
# Older exports store tables that every loader computes itself, quantized ones scales of a narrow KV cache.
_HARMLESS_SUFFIXES = (
    ".rotary_emb.inv_freq",
    ".masked_bias",
    ".attn.bias",
    ".attention.bias",
    *(
        f"{part}.{end}"
        for part in ("self_attn", "attn", "q_proj", "k_proj", "v_proj")
        for end in _CACHE_SCALES
    ),
)
_NARROW_PARTS = ("blocks", "scales")  # behind the name of a tensor of all experts: mxfp4's
_UPLOAD_BYTES = 64 << 20  # of a pinned buffer: 2.5 ms of a bus of 25 GB/s
_NUM_UPLOAD_BUFFERS = 2
_DUMMY_STD = 0.02  # transformers' usual initializer_range: activations stay finite at any depth
_DUMMY_POOL = (1 << 20) - 3  # prime to any row length that is a power of two, so rows differ


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A part of stacked tensors: some of their rows, run by run, and some columns; None: all of them."""

    rows: tuple[range, ...] | None = None
    columns: range | None = None

    def of_vector(self) -> TensorSlice:
        """The same of a tensor with a number a row."""
        return replace(self, columns=None)

    @property
    def first_row(self) -> int:
        """Where it begins."""
        return 0 if self.rows is None else self.rows[0].start

    @property
    def num_rows(self) -> int:
        """How many there are, of a cut by rows."""
        assert self.rows is not None
        return sum(map(len, self.rows))

    def find_pieces(self, stack: Sequence[Tensor]) -> list[Tensor]:
        """The part as views, in its order, of tensors that lie one after the other."""
        runs = self.find_runs([len(tensor) for tensor in stack])
        pieces = [stack[index][rows.start : rows.stop : rows.step] for index, rows in runs]
        columns = self.columns
        return pieces if columns is None else [piece[:, columns.start : columns.stop] for piece in pieces]

    def find_runs(self, sizes: Sequence[int]) -> list[tuple[int, range]]:
        """In its order: which of tensors with so many rows, one after the other, and which rows of it."""
        ends = list(accumulate(sizes))
        clipped = (
            (index, _clip(_shift(rows, size - end), size))
            for rows in self.rows or (range(ends[-1]),)
            for index, (size, end) in enumerate(zip(sizes, ends, strict=True))
        )
        return [(index, rows) for index, rows in clipped if rows]


def _clip(rows: range, size: int) -> range:
    """Those from 0 to below `size`."""
    skipped = max(0, -(rows.start // rows.step)) * rows.step
    return range(rows.start + skipped, min(size, rows.stop), rows.step)


WHOLE = TensorSlice()


class WeightSource(ABC):
    """Named tensors. Every tensor that comes back is the caller's own, on `device` and of `dtype`."""

    def take(self, name: str, shape: Sequence[int], cut: TensorSlice = WHOLE) -> Tensor:
        """The tensor, or a part of it; ModelError when it is missing or of another shape."""
        return self.take_stacked([name], shape[:1], *shape[1:], cut=cut)

    def take_stacked(
        self, names: Sequence[str], sizes: Sequence[int], width: int | None = None, cut: TensorSlice = WHOLE
    ) -> Tensor:
        """The cut of several tensors in one, along the first dimension: [sum(sizes), width], or a vector.

        ModelError also for a number that is not finite, or not in the type that it is taken in.
        """
        out = self._read_stacked(names, sizes, width, cut)
        self._check_taken(out, names, sizes, cut)
        return out

    def _check_taken(
        self, taken: Tensor, names: Sequence[str], sizes: Sequence[int], cut: TensorSlice
    ) -> None:
        if not is_finite(taken):
            runs = cut.find_runs(sizes)
            for (index, _), part in zip(runs, taken.split([len(rows) for _, rows in runs]), strict=True):
                check_finite(names[index], part)

    @abstractmethod
    def _read_stacked(
        self, names: Sequence[str], sizes: Sequence[int], width: int | None, cut: TensorSlice
    ) -> Tensor:
        """As `take_stacked`, whatever the numbers are."""

    def take_narrow(self, name: str, format: WeightFormat, shape: tuple[int, int]) -> NarrowWeight:  # noqa: ARG002
        """The whole weight of the linear layer `name` in a format that the checkpoint stores, on the CPU.

        Its shape is [out, in]. ModelError where the source has no reader for the format's layout.
        """
        raise ModelError(name, format.layout, "a layout that this kind of weight files can hold")

    def take_floats(self, name: str, count: int) -> Tensor:
        """So many numbers in float32, as exact as they are stored."""
        return self.take(name, (count,)).float()

    def take_kernel(self, name: str, num_channels: int, size: int, cut: TensorSlice = WHOLE) -> Tensor:
        """float32 [channels, size] of a convolution of each channel by itself, as exact as it is stored."""
        return self.take(name, (num_channels, size), cut).float()

    def holds(self, name: str) -> bool:  # noqa: ARG002
        """False for a tensor that has others in its place, which some sources may have."""
        return True

    def find_in_stacks(self, prefix: str, spec: ExpertsSpec) -> None:  # noqa: B027
        """Find the experts of a layer also where files hold all of them in one tensor, as the spec says."""

    def skip(self, name: str) -> None:  # noqa: B027
        """Mark a tensor as known and not needed."""

    def skip_layer(self, name: str) -> None:
        """The same of all that belongs to the linear layer `name`, in whatever format."""
        self.skip(f"{name}.weight")

    def finish(self) -> None:  # noqa: B027
        """Close the files; ModelError when they hold a tensor that nobody took or skipped."""


@dataclass(frozen=True, slots=True)
class _StackPlace:
    """Where one expert's projection lies in a tensor of all."""

    stack: str
    expert: int
    num_experts: int
    outputs: slice
    is_transposed: bool | None
    usual: tuple[int, int]  # (a dimension, its size) of [out, in]

    def name(self, part: str) -> str:
        """The stored tensor of a part, such as weight or bias."""
        return self.stack if part == "weight" else f"{self.stack}_{part}"

    def view(self, stored: Tensor, part: str) -> Tensor:
        tensor = stored[self.expert]
        if part != "weight":
            return tensor[self.outputs]
        is_transposed, (dim, size) = self.is_transposed, self.usual
        if is_transposed is None:
            is_transposed = tensor.shape[dim] != size
        return (tensor.t() if is_transposed else tensor)[self.outputs]


class SafetensorsSource(WeightSource):
    """The safetensors files of a folder.

    A checkpoint may leave `optional_prefix` out of its names, and hold tensors whose names begin with one of
    `unused`. `stored_prefixes`: beginnings of its names, and what they are called here.
    """

    def __init__(
        self,
        folder: Path,
        names: Sequence[str],
        dtype: torch.dtype,
        device: torch.device,
        optional_prefix: str = "",
        unused: tuple[str, ...] = (),
        stored_prefixes: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self._dtype = dtype
        self._device = device
        self._files: dict[Path, Any] = {}  # open files; their tensors are read when asked for
        stored = _open_files([folder / name for name in names], self._files)
        # A file and its name there, by the name here.
        self._file_of = {rename_stored(name, stored_prefixes): (path, name) for name, path in stored.items()}
        self._folder = folder
        self._left = set(self._file_of)
        self._optional_prefix = optional_prefix
        self._unused = unused
        self._ring: StagingRing | None = None  # of a GPU's copies
        self._sums: list[tuple[Sequence[str], Tensor]] = []  # of what it has taken, which nobody waits for
        self._skipped_layers: set[str] = set()
        self._stacks: dict[str, _StackPlace] = {}  # by the names of layers

    def _read_stacked(
        self, names: Sequence[str], sizes: Sequence[int], width: int | None, cut: TensorSlice
    ) -> Tensor:
        tail = () if width is None else (width,)
        # First: what config.json calls for may be too large to allocate.
        stored = [self.read_stored(name, (size, *tail)) for name, size in zip(names, sizes, strict=True)]
        pieces = cut.find_pieces(stored)
        sizes = [len(piece) for piece in pieces]
        out = torch.empty((sum(sizes), *pieces[0].shape[1:]), dtype=self._dtype, device=self._device)
        for part, piece in zip(out.split(sizes), pieces, strict=True):
            if self._device.type == "cpu":
                part.copy_(piece)
            else:
                self._upload(part, piece)
        return out

    def _check_taken(
        self, taken: Tensor, names: Sequence[str], sizes: Sequence[int], cut: TensorSlice
    ) -> None:
        if self._device.type == "cpu":
            super()._check_taken(taken, names, sizes, cut)
        else:
            self._sums.append((names, taken.sum()))

    def _upload(self, target: Tensor, source: Tensor) -> None:
        """Copy to the device through pinned buffers: one is filled from the file while the other travels.

        From the file's mapping the driver would copy piece by piece through a small buffer of its own.
        """
        if self._ring is None:
            self._ring = StagingRing(_UPLOAD_BYTES, torch.uint8, self._device, _NUM_UPLOAD_BUFFERS)
        num_rows = _UPLOAD_BYTES // target[0].nbytes
        if num_rows == 0:
            target.copy_(source)
            return
        for part, piece in zip(target.split(num_rows), source.split(num_rows), strict=True):
            staged = torch.from_numpy(self._ring.take(part.nbytes)).view(part.dtype)
            staged.view(part.shape).copy_(piece)
            self._ring.send(part.view(-1).view(torch.uint8))

    def take_narrow(self, name: str, format: WeightFormat, shape: tuple[int, int]) -> NarrowWeight:
        return read_weight(self._find_stored, name, format, shape)

    def find_in_stacks(self, prefix: str, spec: ExpertsSpec) -> None:
        stack, width = spec.stack, spec.intermediate_size
        if stack is None:
            return
        gate, up = slice(width), slice(width, None)
        if stack.is_interleaved:
            gate, up = slice(0, None, 2), slice(1, None, 2)
        places = (
            (spec.gate, stack.gate_up, gate, (0, 2 * width)),
            (spec.up, stack.gate_up, up, (0, 2 * width)),
            (spec.down, stack.down, slice(None), (1, width)),
        )
        for name, stored, outputs, usual in places:
            full = f"{prefix}.{stored}"
            for expert in range(spec.num_experts):
                place = _StackPlace(full, expert, spec.num_experts, outputs, stack.is_transposed, usual)
                self._stacks[f"{prefix}.{name.format(expert)}"] = place

    def skip(self, name: str) -> None:
        layer, _, part = name.rpartition(".")
        place = self._stacks.get(layer)
        for each in (name, *([] if place is None else [place.name(part)])):
            self._left.discard(self.stored_name(each))

    def take_floats(self, name: str, count: int) -> Tensor:
        stored = self._find_stored(name, is_read=True)
        if stored is not None and stored.numel() == count:  # of some models [1, count]
            stored = self.read_stored(name, stored.shape).flatten().float().to(self._device)
            return check_finite(name, stored)
        return self.read_stored(name, (count,))

    def take_kernel(self, name: str, num_channels: int, size: int, cut: TensorSlice = WHOLE) -> Tensor:
        stored = self.read_stored(name, (num_channels, 1, size)).squeeze(1)
        return torch.cat(cut.find_pieces([stored])).float().to(self._device)

    def skip_layer(self, name: str) -> None:
        self._skipped_layers |= {name, name.removeprefix(self._optional_prefix)}
        for part in ("weight", *_NARROW_PARTS) if name in self._stacks else ():
            self.skip(f"{name}.{part}")

    def _is_skipped(self, name: str) -> bool:
        parts = name.split(".")
        return any(".".join(parts[:end]) in self._skipped_layers for end in range(1, len(parts)))

    def stored_name(self, name: str) -> str:
        """What these files call the tensor."""
        names = list_stored_names(name, self._optional_prefix)
        return next((each for each in names if each in self._file_of), name)

    def finish(self) -> None:
        for names, total in self._sums:
            for name in names if not total.isfinite() else ():
                stored = self._find_stored(name, is_read=True)
                assert stored is not None
                check_finite(name, stored.to(self._dtype))
        self._sums.clear()
        self._files.clear()
        self._ring = None
        unexpected = sorted(
            name
            for name in self._left
            if not name.endswith(_HARMLESS_SUFFIXES)
            and not name.startswith(self._unused)
            and not self._is_skipped(name)
        )
        if unexpected:
            raise ModelError(
                "model",
                str(self._folder),
                f"its weights hold {len(unexpected)} tensors that this architecture does not have, "
                f"the first is {unexpected[0]!r}",
            )

    def _find_stored(self, name: str, *, is_read: bool) -> Tensor | None:
        """The file's own tensor, a view of its mapping; None where there is none."""
        stored_name = self.stored_name(name)
        if stored_name not in self._file_of:
            return self._find_stacked(name, is_read=is_read)
        path, name_in_file = self._file_of[stored_name]
        if is_read:
            self._left.discard(stored_name)
        try:
            return self._files[path].get_tensor(name_in_file)
        except (SafetensorError, OSError) as error:
            raise _unreadable(path, error) from error

    def _find_stacked(self, name: str, *, is_read: bool) -> Tensor | None:
        layer, _, part = name.rpartition(".")
        place = self._stacks.get(layer)
        if place is None:
            return None
        whole = self._find_stored(place.name(part), is_read=is_read)
        if whole is None:
            return None
        if whole.dim() < 2 or len(whole) != place.num_experts:
            raise ModelError(place.name(part), list(whole.shape), f"a tensor of {place.num_experts} experts")
        return place.view(whole, part)

    def read_stored(self, name: str, shape: Sequence[int]) -> Tensor:
        """A floating tensor as its file has it, a view of its mapping. Raises as `take`."""
        tensor = self._find_stored(name, is_read=True)
        if tensor is None:
            raise ModelError("model", str(self._folder), f"its weights must hold the tensor {name!r}")
        if tensor.dim() == 0:
            tensor = tensor.view(1)
        if tuple(tensor.shape) != tuple(shape):
            raise ModelError(
                name, list(tensor.shape), f"the shape {list(shape)}, which config.json calls for"
            )
        if tensor.dtype not in _FLOAT_TYPES:
            raise ModelError(name, str(tensor.dtype), "a floating point type; config.json names no other")
        return tensor


class DummySource(WeightSource):
    """Random weights of a fixed seed: norms are one, all else is normal with a small deviation.

    Every tensor repeats one pool of random numbers, from a start that its name decides: as fast as copying.
    """

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self._seed = seed % (1 << 62)
        generator = torch.Generator().manual_seed(seed)
        pool = torch.randn(_DUMMY_POOL, generator=generator) * _DUMMY_STD
        self._pool = pool.to(dtype=dtype, device=device)

    def _read_stacked(
        self, names: Sequence[str], sizes: Sequence[int], width: int | None, cut: TensorSlice
    ) -> Tensor:
        whole = self._make_stacked(names, sizes, width)
        return whole if cut == WHOLE else torch.cat(cut.find_pieces([whole]))

    def take_narrow(self, name: str, format: WeightFormat, shape: tuple[int, int]) -> NarrowWeight:
        return make_dummy_weight(format, shape, _DUMMY_STD, self._seed + zlib.crc32(name.encode()))

    def _make_stacked(self, names: Sequence[str], sizes: Sequence[int], width: int | None) -> Tensor:
        shape = (sum(sizes),) if width is None else (sum(sizes), width)
        out = torch.empty(shape, dtype=self._pool.dtype, device=self._pool.device)
        if names[0].lower().endswith("norm.weight"):
            return out.fill_(1.0)
        flat = out.view(-1)
        pool = self._pool.roll(zlib.crc32(names[0].encode()) % _DUMMY_POOL)
        for start in range(0, flat.numel(), _DUMMY_POOL):
            part = flat[start : start + _DUMMY_POOL]
            part.copy_(pool[: part.numel()])
        return out


def _open_files(paths: Sequence[Path], files: dict[Path, Any]) -> dict[str, Path]:
    """Open every file into `files`; which of them holds which tensor."""
    file_of: dict[str, Path] = {}
    for path in paths:
        try:
            files[path] = safe_open(path, framework="pt")  # pyright: ignore[reportArgumentType]
        except (SafetensorError, OSError) as error:
            raise _unreadable(path, error) from error
        file_of.update(dict.fromkeys(files[path].keys(), path))
    return file_of


def open_tensors(paths: Sequence[Path]) -> dict[str, Tensor]:
    """Every tensor of safetensors files, a view of the file's mapping. Raises ModelError."""
    files: dict[Path, Any] = {}
    tensors: dict[str, Tensor] = {}
    for name, path in _open_files(paths, files).items():
        try:
            tensors[name] = files[path].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise _unreadable(path, error) from error
    return tensors


def _unreadable(path: Path, error: Exception) -> ModelError:
    return ModelError("model", str(path), f"a readable file; truncated or corrupt? {error}")


_CODEBOOK = 16


def make_dummy_weight(
    weight_format: WeightFormat, shape: tuple[int, int], std: float, seed: int
) -> NarrowWeight:
    """Random, as wide as a checkpoint's and as fast: [out, in] with numbers of about the deviation `std`."""
    num_out, num_in = shape
    generator = torch.Generator().manual_seed(seed)
    groups = weight_format.count_groups(num_in)
    if weight_format.kind == "fp8":
        values = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
        scales = torch.full((-(-num_out // (weight_format.group_rows or num_out)), groups), std)
        return ScaledFp8Weight(values, scales, weight_format.group_rows, weight_format.group_size)
    bits, middle = weight_format.bits, 1 << weight_format.bits - 1
    width = num_in if bits == 8 else -(-num_in // 2)
    codes = torch.randint(0, 256, (num_out, width), generator=generator, dtype=torch.uint8)
    step = std * 12**0.5 / (2 * middle)  # of numbers spread evenly over a range
    dtype = torch.bfloat16 if weight_format.scale_dtype == "bfloat16" else torch.float32
    scales = torch.full((num_out, groups), middle * step if weight_format.has_codebook else step, dtype=dtype)
    order = torch.Generator().manual_seed(num_in)  # the same for what lies in one layer
    return IntegerWeight(
        codes,
        scales,
        bits,
        num_in,
        weight_format.group_size,
        scales.float() * middle if weight_format.has_offsets else None,
        torch.randperm(num_in, generator=order).int() if weight_format.has_permutation else None,
        torch.linspace(-1, 1, _CODEBOOK) if weight_format.has_codebook else None,
    )
