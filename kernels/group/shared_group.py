"""What the ranks of a group, which compute one model, do together: sums, rows side by side, data of rank 0.

Where they are several stages, one after the other, that is between the ranks of one stage; between stages
only `send` and `receive` are. An abort and a reset are of all.

Ranks are processes on one machine that have a file mapped (shared_group.cpp). Every rank calls the same
operations in the same order. One that cannot go on aborts: then the others' operations end too, as do all
that follow, until all ranks have called `reset`. A sum is taken in the order of ranks, in float32, and
rounded once: all ranks have the same bits, whenever each of them came.
"""

from __future__ import annotations

import ctypes
import os

import torch
from torch import Tensor

from ..program.native import load_library

# Each rank has two slots of this size, which the others read; what is larger goes in pieces.
DEFAULT_SLOT_BYTES = 1 << 20
DEFAULT_RING_BYTES = 1 << 20  # of hidden states on their way to the next stage
# Microseconds. To wake a sleeper takes 5 to 50; two ranks that spin on one core would keep each other off it.
SPIN_US = 30
_MAX_TEXT_BYTES = 1024
_OK, _LOST = 0, 2
_FAILURE, _SHORTAGE = b"F", b"M"  # before an abort's text: what the rank that aborts has met


class GroupAborted(RuntimeError):
    """Another rank could not go on, and says why."""

    def __init__(self, reason: str, is_out_of_memory: bool = False) -> None:
        super().__init__(reason)
        self.is_out_of_memory = is_out_of_memory


class GroupLost(RuntimeError):
    """A rank has ended: there is no group any more."""


class _Shape(ctypes.Structure):
    """QuireGroupShape."""

    _fields_ = (
        ("slot_bytes", ctypes.c_int64),
        ("ring_bytes", ctypes.c_int64),
        ("size", ctypes.c_int32),
        ("stage_size", ctypes.c_int32),
    )


class SharedGroup:
    """One rank's place in its group. One thread uses it at a time; `abort` may come from any.

    `rank` and `size` are those in its stage, of which there may be one. `is_native`: operations of a native
    program can take `handle`; `is_exact`: a sum's bits do not depend on what else is added up beside it.
    """

    is_native = is_exact = True

    def __init__(
        self,
        path: str,
        rank: int,
        size: int,
        slot_bytes: int = DEFAULT_SLOT_BYTES,
        spin_us: int = SPIN_US,
        *,
        num_stages: int = 1,
        ring_bytes: int = DEFAULT_RING_BYTES,
    ) -> None:
        """Open the file at `path`, which all ranks share and the first makes as large as it must be.

        `rank` of `size` in all stages together, the first stage's first. `slot_bytes` and `ring_bytes` are
        the same in all ranks; the latter, a power of 2, may be on their way from one stage to the next.
        `spin_us`: how long an operation looks for the others before it sleeps; 0 where there are fewer cores
        than ranks. Raises RuntimeError without the native kernels, and OSError.
        """
        library = load_library()
        if library is None:
            raise RuntimeError("a group of ranks needs the native CPU kernels")
        self.size = size // num_stages
        self.rank = rank % self.size
        self._number = rank
        self._library = library
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        shape = _Shape(slot_bytes, ring_bytes if num_stages > 1 else 0, size, self.size)
        handle = library.quire_group_join(fd, rank, ctypes.addressof(shape), spin_us)
        if handle is None:
            os.close(fd)
            raise OSError(f"{path} cannot be made as large as {size} ranks need, or not be mapped")
        self.handle: int = handle  # for native code, such as a program's operations

    def all_reduce(self, x: Tensor) -> None:
        """`x`, contiguous float32 or bfloat16 on the CPU, becomes its sum over all ranks."""
        is_bf16 = x.dtype is torch.bfloat16
        self._finish(self._library.quire_all_reduce(self.handle, x, x.numel(), is_bf16))

    def gather_slices(self, rows: Tensor, out: Tensor | None) -> None:
        """The ranks' `rows` [N, their width] side by side, in the order of ranks, into `out` [N, all widths].

        All are contiguous and of one type. None: this rank only gives its own.
        """
        width = rows.shape[1] * rows.itemsize
        self._finish(self._library.quire_gather_slices(self.handle, rows, rows.shape[0], width, out))

    def exchange(self, number: int) -> list[int]:
        """What each rank gives, in the order of ranks; all of a stage wait for each other."""
        numbers = torch.empty((1, self.size), dtype=torch.int64)
        SharedGroup.gather_slices(self, torch.tensor([[number]], dtype=torch.int64), numbers)
        return numbers[0].tolist()

    def broadcast(self, data: Tensor) -> None:
        """`data`, contiguous and of one size in all ranks, becomes rank 0's, which does not wait for them."""
        self._finish(self._library.quire_broadcast(self.handle, data, data.nbytes))

    def send(self, data: Tensor) -> None:
        """Give `data`, contiguous on the CPU, to all ranks of the next stage; after the last comes the first.

        Of the first rank of a stage. Returns when it may be overwritten; waits only while the ring is full.
        """
        self._finish(self._library.quire_group_send(self.handle, data, data.nbytes))

    def receive(self, data: Tensor) -> None:
        """Wait for what the stage before this one has sent, which is as large as `data`, and put it there."""
        self._finish(self._library.quire_group_receive(self.handle, data, data.nbytes))

    def note_step(self) -> None:
        """This rank has done one more step; the core reads it where it looks for who is behind."""
        self._library.quire_group_note_step(self.handle)

    def abort(self, reason: str, is_out_of_memory: bool = False) -> None:
        """This rank cannot go on: operations of all raise GroupAborted until `reset`. The first counts."""
        kind = _SHORTAGE if is_out_of_memory else _FAILURE
        text = (kind + f"rank {self._number}: {reason}".encode())[:_MAX_TEXT_BYTES]
        self._library.quire_group_abort(self.handle, text, len(text))

    def check(self) -> None:
        """Raises GroupAborted if a rank has aborted; for native code that does not look at each operation."""
        self._finish(self._library.quire_group_status(self.handle))

    def reset(self) -> None:
        """Begin anew, once all ranks have called this. Raises GroupLost."""
        self._finish(self._library.quire_group_reset(self.handle))

    def leave(self) -> None:
        """Let go of the memory; nothing else may follow."""
        self._library.quire_group_leave(self.handle)

    def _finish(self, status: int) -> None:
        if status == _OK:
            return
        buffer = ctypes.create_string_buffer(_MAX_TEXT_BYTES)
        size = self._library.quire_group_abort_text(self.handle, buffer, _MAX_TEXT_BYTES)
        raw = buffer.raw[:size]
        is_ours = raw[:1] in (_FAILURE, _SHORTAGE)  # else native code has aborted
        text = raw[is_ours:].decode(errors="replace")
        if status == _LOST:
            raise GroupLost(text)
        raise GroupAborted(text, raw[:1] == _SHORTAGE)
