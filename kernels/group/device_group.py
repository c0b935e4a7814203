"""A group of ranks whose tensors are on devices: sums and slices go through torch.distributed, NCCL on GPUs.

What is on the host (tokens, an abort, the agreement at a reset) stays with the memory that the ranks share
(shared_group.py). Where another rank aborts, the communicator is aborted too: a GPU waits for the others for
ever, and so would who waits for the GPU. At the next reset all make a new one.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .shared_group import SPIN_US, GroupAborted, SharedGroup

# How often who waits in an operation looks whether another rank has aborted.
_LOOK_INTERVAL_S = 0.02
_POLL_INTERVAL_S = 0.0002  # of who waits for a CPU's operation, as gloo's; a GPU's queue waits itself
_MAX_PATH_BYTES = 64

# A communicator of torch's among ranks: (store, rank, size, device) -> a ProcessGroupNCCL or its like.
MakeCommunicator = Callable[[Any, int, int, torch.device], Any]


def make_nccl(store: Any, rank: int, size: int, device: torch.device) -> Any:
    """NCCL among GPUs, of which each rank has one. It finds the ways between them itself."""
    from torch.distributed import ProcessGroupNCCL

    torch.cuda.set_device(device)
    return ProcessGroupNCCL(store, rank, size, ProcessGroupNCCL.Options())


class DeviceGroup(SharedGroup):
    """One rank's place in a group that has a device a rank.

    `all_reduce` and `gather_slices` take tensors on the device, and on a GPU only queue their work; all else
    is on the host, as in SharedGroup. `note_step` waits for what is queued.
    """

    is_native = False

    def __init__(
        self,
        path: str,
        rank: int,
        size: int,
        device: torch.device,
        spin_us: int = SPIN_US,
        *,
        sums_in_order: bool = False,
        make_communicator: MakeCommunicator = make_nccl,
    ) -> None:
        """`connect` is to follow. `sums_in_order`: those of more than two ranks are taken in the order of
        ranks, which takes more time; NCCL's own order depends on where a number lies. Raises as SharedGroup.
        """
        super().__init__(path, rank, size, spin_us=spin_us)
        self.is_exact = sums_in_order or size == 2
        self._device, self._sums_in_order = device, sums_in_order and size > 2
        self._make_communicator, self._num_made = make_communicator, 0
        # Without a name in any folder; the others open it as this process's. It stays open until the process
        # ends: a FileStore writes to it when it is let go of, whatever file then has the number.
        self._store_fd = os.memfd_create("quire-rendezvous", os.MFD_CLOEXEC) if rank == 0 else None
        self._communicator: Any = None
        self._widths: dict[int, list[int]] = {}  # of all ranks' slices, by this one's
        self._watch = _AbortWatch(self._is_aborted, self._abort_communicator)

    def connect(self) -> None:
        """Make a communicator with all other ranks, which do so too. Returns once they have added something
        up; raises what torch raises.
        """
        from torch.distributed import FileStore, PrefixStore

        path = torch.zeros(_MAX_PATH_BYTES, dtype=torch.uint8)
        if self._store_fd is not None:
            name = f"/proc/{os.getpid()}/fd/{self._store_fd}".encode()
            path[: len(name)] = torch.tensor(list(name), dtype=torch.uint8)
        self.broadcast(path)
        self._num_made += 1
        store = FileStore(bytes(path.tolist()).rstrip(b"\0").decode())
        named = PrefixStore(f"communicator {self._num_made}", store)
        self._communicator = self._make_communicator(named, self.rank, self.size, self._device)
        # The first operation is what connects the ranks, and takes the memory for that.
        self.all_reduce(torch.zeros(1, device=self._device))
        self._wait_for_device()
        self.exchange(0)  # nobody may go on, and abort, before all have come through

    def all_reduce(self, x: Tensor) -> None:
        """`x`, contiguous and on the device, becomes its sum over all ranks."""
        if not self._sums_in_order:
            self._run(lambda communicator: communicator.allreduce([x]))
            return
        parts = x.new_empty((self.size, *x.shape)).unbind()
        self._run(lambda communicator: communicator.allgather([list(parts)], [x]))
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part
        x.copy_(total)

    def gather_slices(self, rows: Tensor, out: Tensor | None) -> None:
        """As SharedGroup's, on the device; only rank 0 has an `out`."""
        from torch.distributed import GatherOptions

        options = GatherOptions()
        options.rootRank = 0
        widths = self._find_widths(rows.shape[1])
        wide = F.pad(rows, (0, max(widths) - rows.shape[1]))
        parts = [] if out is None else [list(wide.new_empty((self.size, *wide.shape)).unbind())]
        self._run(lambda communicator: communicator.gather(parts, [wide], options))
        if out is not None:
            slices = [part[:, :width] for part, width in zip(parts[0], widths, strict=True)]
            torch.cat(slices, dim=1, out=out)

    def note_step(self) -> None:
        """Wait for what the step has queued. Raises GroupAborted if a rank has aborted meanwhile."""
        self._wait_for_device()
        self.check()
        super().note_step()

    def abort(self, reason: str, is_out_of_memory: bool = False) -> None:
        super().abort(reason, is_out_of_memory)
        self._abort_communicator()

    def reset(self) -> None:
        """Begin anew, with a new communicator if that of any rank was aborted."""
        self._watch.rest()
        super().reset()
        self._widths.clear()  # an exchange of them may have reached some ranks and not others
        if any(self.exchange(int(self._communicator is None))):
            self._abort_communicator()
            self.connect()

    def leave(self) -> None:
        self._watch.stop()
        self._abort_communicator()
        super().leave()

    def _wait_for_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._watch.rest()

    def _run(self, start: Callable[[Any], Any]) -> None:
        """Do an operation; on a GPU queue it. Raises GroupAborted if a rank has aborted."""
        self._watch.need()
        communicator = self._communicator
        self.check()  # after the line above: who ends the communicator has aborted before
        try:
            work = start(communicator)
            while self._device.type == "cpu" and not work.is_completed():
                self.check()
                time.sleep(_POLL_INTERVAL_S)
            work.wait()  # of a GPU's not for the work: what is queued after it comes after it
        except RuntimeError:
            self.check()  # an operation fails more often by another rank's abort than by itself
            raise

    def _find_widths(self, width: int) -> list[int]:
        """The widths of all ranks' slices, exchanged once: they change in all ranks or in none."""
        if width not in self._widths:
            self._widths[width] = self.exchange(width)
        return self._widths[width]

    def _is_aborted(self) -> bool:
        try:
            self.check()
        except GroupAborted:
            return True
        return False

    def _abort_communicator(self) -> None:
        """End what waits for other ranks. Idempotent, from any thread."""
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.abort()


class _AbortWatch:
    """A thread that calls `end` when `is_aborted` while it is needed; when it is not, it sleeps."""

    def __init__(self, is_aborted: Callable[[], bool], end: Callable[[], None]) -> None:
        self._is_aborted, self._end = is_aborted, end
        self._is_needed = self._has_stopped = False
        self._wake, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._run, name="abort-watch", daemon=True)
        self._thread.start()

    def need(self) -> None:
        """Look from here on."""
        if not self._is_needed:
            with self._lock:
                self._is_needed = True
                self._wake.set()

    def rest(self) -> None:
        """Call `end` no more, until it is needed again."""
        with self._lock:
            self._is_needed = False

    def stop(self) -> None:
        """Returns when the thread has ended."""
        self._has_stopped = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        while self._wake.wait() and not self._has_stopped:
            with self._lock:
                if self._is_needed and self._is_aborted():
                    self._end()
                    self._is_needed = False
                if not self._is_needed:
                    self._wake.clear()
            time.sleep(_LOOK_INTERVAL_S)
