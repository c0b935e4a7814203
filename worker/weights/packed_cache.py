"""PackedCache: a model's narrow weights as the CPU kernels take them, kept in a file for the next start.

A file is of one rank of one model. Its name is a hash of what the weight files hold, of the source that
makes it, of the processor and the kernels' variant. It lies in a PrivateCache, and each tensor has a
checksum: what is not as it was written, or cannot be read, is packed again. It is read into huge pages, from
which a step reads weights a third faster than from a file's pages. Who has opened one may have it removed by
another: the descriptor holds.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch
from torch import Tensor

from ...ipc.decoding import decode_msgpack
from ...ipc.files.file_samples import add_samples
from ...ipc.files.private_cache import PrivateCache
from ...ipc.spec.config import EngineConfig
from ...kernels.choice import choose_linear, native_library
from ...kernels.linear.linear import Format, PackedWeight, choose_variant
from ...kernels.program.build import cache_folder
from ...kernels.program.huge_pages import allocate_huge
from ..layers.linear import Linear, NativeLinear
from .weights import WeightSource

_LOGGER = logging.getLogger(__name__)

MIN_BYTES = 64 << 20  # what less takes to pack is not worth a file
_NUM_READERS = 4  # requests to the disk at a time
_SEAL = b"quire-packed-1:"  # then the digest of the index and its length
_SEAL_BYTES = len(_SEAL) + hashlib.sha256().digest_size + 8
_ALIGNMENT = 64
_PAGE_BYTES = 4096


class _Stored(msgspec.Struct):
    """Where a tensor lies."""

    offset: int
    dtype: str
    shape: tuple[int, ...]
    checksum: int


class _Layer(msgspec.Struct):
    """A PackedWeight by its fields."""

    numbers: dict[str, int]
    tensors: dict[str, _Stored]


@dataclass(frozen=True, slots=True)
class _Pending:
    """A layer on its way from the file; a tensor is None where it is not what was written."""

    numbers: dict[str, int]
    tensors: dict[str, Future[Tensor | None]]


class PackedCache:
    """The layers of one model's part on this processor, in the file `name` of `cache`; None keeps nothing.

    `max_bytes`: of all files in the cache.
    """

    def __init__(self, cache: PrivateCache | None = None, name: str = "", max_bytes: int = 0) -> None:
        self._cache, self._name, self._max_bytes = cache, name, max_bytes
        self._kept: dict[str, PackedWeight] = {}
        self._is_complete = True  # whether all layers have come from the file
        self._readers: ThreadPoolExecutor | None = None
        self._file: BinaryIO | None = None
        self._pending = {} if cache is None else self._open(cache)
        self._writer: threading.Thread | None = None

    def take(self, names: Sequence[str], weights: WeightSource) -> PackedWeight | None:
        """The layer made of those of these names, None where it must be made of the checkpoint.

        `weights` need not read the tensors of what is returned.
        """
        pending = self._pending.pop(names[0], None)
        if pending is None:
            return None
        tensors = {field: tensor.result() for field, tensor in pending.tensors.items()}
        if any(tensor is None for tensor in tensors.values()):
            assert self._cache is not None
            self._cache.note_fault(self._name, f"{names[0]} has another checksum")
            return None
        numbers = {**pending.numbers, "format": Format(pending.numbers["format"])}
        weight = PackedWeight(**numbers, **tensors)  # pyright: ignore[reportArgumentType]
        self._kept[names[0]] = weight
        for name in names:
            weights.skip_layer(name)
        return weight

    def keep(self, name: str, linear: Linear) -> None:
        """Have a layer that was made of the checkpoint in the file."""
        if self._cache is None or name in self._kept:
            return
        if isinstance(linear, NativeLinear) and linear.packed.scales is not None:
            self._kept[name] = linear.packed
            self._is_complete = False

    def finish(self) -> None:
        """All layers have been taken or kept: write the file, in a thread, unless it holds them."""
        if self._readers is not None:
            self._readers.shutdown(wait=False, cancel_futures=True)
        if self._file is not None:
            self._file.close()
        size = sum(weight.size_bytes for weight in self._kept.values())
        if self._cache is None or self._is_complete or not MIN_BYTES <= size <= self._max_bytes:
            return
        arguments = self._cache, self._name, self._kept, size, self._max_bytes
        self._writer = threading.Thread(target=_write_quietly, args=arguments, daemon=True)
        self._writer.start()

    def wait(self) -> None:
        """Until the file is written."""
        if self._writer is not None:
            self._writer.join()

    def _open(self, cache: PrivateCache) -> dict[str, _Pending]:
        """Begin to read everything, in the order in which it was kept; {} where there is no whole file."""
        descriptor = cache.open_file(self._name)
        if descriptor is None:
            return {}
        self._file = os.fdopen(descriptor, "rb")
        try:
            index = _read_index(descriptor)
        except OSError:
            index = None
        if not index:
            cache.note_fault(self._name, "it is not whole")
            return {}
        cache.note_used(self._name)
        self._readers = ThreadPoolExecutor(_NUM_READERS)
        return {
            name: _Pending(
                layer.numbers,
                {
                    field: self._readers.submit(_read_tensor, descriptor, stored)
                    for field, stored in layer.tensors.items()
                },
            )
            for name, layer in index.items()
        }


def open_packed_cache(config: EngineConfig, device: torch.device, rank: int, num_ranks: int) -> PackedCache:
    """The cache of `config`'s model, which keeps nothing if there is nothing to pack or no kernel for it."""
    model = config.model
    formats = model.weight_formats
    has_narrow = formats.default is not None or any(formats.exceptions.values())
    dtype: torch.dtype = getattr(torch, model.dtype)
    max_bytes = model.packed_cache_bytes
    if not max_bytes or not has_narrow or model.load_format == "dummy":
        return PackedCache()
    if device.type != "cpu" or choose_linear(dtype, device, "narrow", False) != "native":
        return PackedCache()
    try:
        library = native_library()
        digest = hashlib.sha256(Path(library._name).name.encode())
        folder = Path(__file__).parents[1]
        for path in sorted((*folder.glob("**/*.py"), *(folder.parent / "kernels").rglob("*.py"))):
            digest.update(path.read_bytes())
        digest.update(bytes([choose_variant(library)]))  # an operating system may refuse a processor's AMX
        digest.update(msgspec.msgpack.encode((model.spec, formats, model.dtype, rank, num_ranks)))
        for name in model.weight_files:
            path = Path(model.model, name)
            # Unlike that of a change of contents, which archives and copies set, this time is always new.
            digest.update(path.stat().st_ctime_ns.to_bytes(8, "little", signed=True))
            add_samples(digest, path)
        cache = PrivateCache(cache_folder() / "packed")
    except OSError as error:
        _LOGGER.warning("packed weights are not kept: %s", error)
        return PackedCache()
    return PackedCache(cache, digest.hexdigest()[:32], max_bytes)


def _read_index(descriptor: int) -> dict[str, _Layer] | None:
    """The file's index; None if the file is not whole."""
    size = os.fstat(descriptor).st_size
    seal = os.pread(descriptor, _SEAL_BYTES, max(0, size - _SEAL_BYTES))
    length = int.from_bytes(seal[-8:], "little")
    if not seal.startswith(_SEAL) or length > size:
        return None
    index = os.pread(descriptor, length, size - _SEAL_BYTES - length)
    if hashlib.sha256(index).digest() != seal[len(_SEAL) : -8]:
        return None
    return decode_msgpack(index, dict[str, _Layer])


def _read_tensor(descriptor: int, stored: _Stored) -> Tensor | None:
    dtype: torch.dtype = getattr(torch, stored.dtype)
    size = torch.Size(stored.shape).numel() * dtype.itemsize
    memory = allocate_huge(max(1, size))[:size]
    view, done = memory.numpy().data, 0
    while done < size:
        try:
            count = os.preadv(descriptor, [view[done:]], stored.offset + done)
        except OSError:
            return None
        if not count:
            return None
        done += count
    return memory.view(dtype).view(stored.shape) if _sum(memory) == stored.checksum else None


def _sum(memory: Tensor) -> int:
    """Of its words, so that any one that changes, and pages in another order, are seen.

    A page's sum counts an odd number of times, another one for each page: as fast as memory is read.
    """
    whole = len(memory) // _PAGE_BYTES * _PAGE_BYTES
    pages = memory[:whole].view(torch.int64).view(-1, _PAGE_BYTES // 8).sum(1)
    sums = torch.cat([pages, memory[whole:].long()])
    return int((sums * (2 * torch.arange(len(sums)) + 1)).sum())


def _write_quietly(
    cache: PrivateCache, name: str, layers: dict[str, PackedWeight], size: int, max_bytes: int
) -> None:
    """A cache that cannot be written is none."""
    with contextlib.suppress(OSError):
        cache.remove_old(max_bytes=max_bytes - size, kept=name)
        room = os.statvfs(cache.folder)
        if room.f_bavail * room.f_frsize < 2 * size:
            _LOGGER.warning("packed weights are not kept: %s has no room for %d MB", cache.folder, size >> 20)
            return
        with cache.scratch() as scratch:
            _write(scratch / name, layers)
            cache.put(scratch / name)


def _write(path: Path, layers: dict[str, PackedWeight]) -> None:
    with path.open("wb") as file:
        index = {name: _write_layer(file, weight) for name, weight in layers.items()}
        text = msgspec.msgpack.encode(index)
        file.write(text + _SEAL + hashlib.sha256(text).digest() + len(text).to_bytes(8, "little"))


def _write_layer(file: BinaryIO, weight: PackedWeight) -> _Layer:
    layer = _Layer({}, {})
    for field in fields(weight):
        value: Any = getattr(weight, field.name)
        if isinstance(value, int):
            layer.numbers[field.name] = int(value)
        elif isinstance(value, Tensor):
            memory = value.contiguous().view(-1).view(torch.uint8)
            file.seek(-file.tell() % _ALIGNMENT, os.SEEK_CUR)
            dtype = str(value.dtype).removeprefix("torch.")
            layer.tensors[field.name] = _Stored(file.tell(), dtype, tuple(value.shape), _sum(memory))
            file.write(memory.numpy().data)
    return layer
