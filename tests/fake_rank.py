"""`python -m fake_rank`: a rank that computes nothing, but waits for the others in every step.

All ranks answer, though only rank 0 should be heard. Rank r has room for 100 - r blocks; with the model name
"odd" it has loaded other weights than the ranks before it.
"""

from __future__ import annotations

import os
import struct
import time

import msgspec
import zmq
from quire.ipc.processes.child_args import WorkerArgs
from quire.ipc.processes.fault_hooks import make_fault_hooks
from quire.ipc.processes.process import Lifeline, enable_stack_dumps
from quire.ipc.protocol.codec import make_step_codec
from quire.ipc.protocol.sockets import connect_dealer
from quire.ipc.protocol.step import (
    ModelRunnerOutput,
    ResetRows,
    SchedulerOutput,
    WorkerProgress,
    WorkerReady,
)

NUM_BLOCKS = 100
_POLL_S = 0.001


class Stamps:
    """How many steps each rank has done, where the core looks for it."""

    def __init__(self, args: WorkerArgs) -> None:
        self._fd = os.open(args.group_path, os.O_RDWR)
        self._rank, self._size = args.rank, args.config.parallel.num_ranks

    def reach(self, count: int) -> None:
        """This rank is as far; returns when all are."""
        os.pwrite(self._fd, struct.pack("<III", count, 0, count), 4096 * (1 + self._rank))
        while any(self._read(rank) < count for rank in range(self._size)):
            time.sleep(_POLL_S)

    def _read(self, rank: int) -> int:
        raw = os.pread(self._fd, 4, 4096 * (1 + rank))
        return struct.unpack("<I", raw)[0] if len(raw) == 4 else 0


def main() -> None:
    lifeline = Lifeline()
    lifeline.watch(grace_s=0.0)
    enable_stack_dumps()
    args = msgspec.msgpack.decode(lifeline.args, type=WorkerArgs)
    faults = make_fault_hooks(args.config.fault_hooks, "worker", args.rank)
    stamps, codec = Stamps(args), make_step_codec()
    identity = b"worker-%d" % args.rank
    socket = connect_dealer(zmq.Context().socket(zmq.DEALER), args.address, identity, keys=args.keys)
    socket.send_multipart(codec.encode(WorkerProgress(f"start rank {args.rank}", time.time())))
    if faults is not None:
        faults.reach("worker.start")
    is_odd = args.config.model.served_model_name == "odd"
    weights_id = f"weights-{args.rank if is_odd else 0}"
    ledger = [("weights", 10)]
    socket.send_multipart(
        codec.encode(WorkerReady(NUM_BLOCKS - args.rank, "fake", ledger, weights_id=weights_id))
    )
    num_steps = 0
    while True:
        message = codec.decode(socket.recv_multipart())
        if isinstance(message, ResetRows):
            continue
        assert isinstance(message, SchedulerOutput)
        if faults is not None:
            faults.reach("worker.execute")
        num_steps += 1
        stamps.reach(num_steps)
        answer = ModelRunnerOutput(message.step_id, message.rows, [args.rank] * len(message.rows))
        socket.send_multipart(codec.encode(answer))


if __name__ == "__main__":
    main()
