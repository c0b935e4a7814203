"""NodeGroup: the ranks of a worker on a node of a cluster. Ray's actor there is one; it knows nothing of Ray.

The launcher's side of a call is bytes and text. What the ranks compute, and for whom, never comes by here:
they connect to their core themselves.
"""

from __future__ import annotations

import math
import os
import select
import socket
import time
from pathlib import Path

import msgspec

from ....ipc.decoding import decode_msgpack
from ....ipc.errors import ModelError, QuireError
from ....ipc.files.file_identity import NotedFiles, note_files
from ....ipc.files.file_samples import hash_samples
from ....ipc.network.keys import ClientKeys
from ....ipc.network.tcp_address import parse_tcp_address
from ....ipc.processes.child_args import WorkerArgs
from ....ipc.processes.due import until_ms
from ....ipc.processes.own_sources import OwnSources
from ....ipc.processes.process import EXIT_PARENT_LOST, ProcessHandle
from ....ipc.spec.config import EngineConfig
from ...workers.local_place import start_rank
from ...workers.worker_group import WorkerGroup, name_roles

_SHOWN = 12  # characters of a hash
_REACH_TIMEOUT_S = 5.0


class NodeArgs(msgspec.Struct, frozen=True, kw_only=True):
    """A worker elsewhere: where its core listens, what to load, and what the node must have for that."""

    address: str
    keys: ClientKeys
    config: EngineConfig
    module: str  # of a worker's process
    sources: str  # compute_source_digest of the core's machine
    weights: dict[str, str]  # name in the model's folder -> hash_samples there

    def make(self, rank: int) -> WorkerArgs:
        """The arguments of a rank."""
        return WorkerArgs(address=self.address, rank=rank, config=self.config, keys=self.keys)


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """A node's answer before anything is started; `error` is why nothing can be, of the class `kind`."""

    host: str
    error: str = ""
    kind: str = ""


class NodeEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How the ranks have ended: as `exit_code` of a ChildProcess, and in words."""

    exit_code: int
    reason: str


class NodeGroup:
    """`check` comes first, then `run`, once; `dump_stacks` at any time, from another thread."""

    def __init__(self, args: bytes) -> None:
        """`args`: NodeArgs. Nothing is read or started yet."""
        self._args = args
        self._processes: list[ProcessHandle] = []

    def check(self) -> bytes:
        """A NodeReport: whether this is the same Quire, with the same weights."""
        report = NodeReport(host=socket.gethostname())
        try:
            _check_node(self._args)
        except QuireError as error:
            report = NodeReport(host=report.host, error=str(error), kind=type(error).__name__)
        return msgspec.msgpack.encode(report)

    def run(self) -> bytes:
        """Start the ranks and wait until one has ended, which ends all: a NodeEnd.

        This process leaves hard if its parent, Ray's, is gone, and the ranks with it.
        """
        args = _note_own_files(decode_msgpack(self._args, NodeArgs))
        roles = name_roles(args.config.parallel.num_ranks)
        group = WorkerGroup(
            args.config.parallel, lambda rank, fd: start_rank(args.module, roles[rank], args.make(rank), fd)
        )
        for deadline in group.start():
            if args.config.step_timeout_s:  # else one that a signal has stopped may stay so
                deadline.set(time.monotonic(), math.inf, "")
        self._processes = group.processes
        exit_code = _wait_for_end(group)
        return msgspec.msgpack.encode(NodeEnd(exit_code=exit_code, reason=group.stop(0.0)))

    def dump_stacks(self) -> None:
        """Have all ranks write their stacks to standard error."""
        for process in self._processes:
            process.dump_stacks()


def _check_node(payload: bytes) -> None:
    """Raises QuireError, naming what differs or is missing."""
    sources = compute_source_digest()
    try:
        args = decode_msgpack(payload, NodeArgs)
    except msgspec.MsgspecError:  # another version's
        args = None
    if args is None or args.sources != sources:
        there = "unknown" if args is None else args.sources
        raise QuireError(f"its sources of Quire ({sources}) are not those of the engine's machine ({there})")
    _check_weights(Path(args.config.model.model), args.weights)
    try:
        place = parse_tcp_address("address", args.address)
        socket.create_connection((place.host, place.port), timeout=_REACH_TIMEOUT_S).close()
    except OSError as error:
        raise QuireError(f"it does not reach the engine at {args.address}: {error}") from None


def _check_weights(folder: Path, weights: dict[str, str]) -> None:
    for name, there in weights.items():
        try:
            here = hash_samples(folder / name)
        except OSError as error:
            allowed = f"a folder that all nodes have; {name}: {error.strerror}"
            raise ModelError("model", str(folder), allowed) from None
        if here != there:
            sums = f"{here[:_SHOWN]} here, {there[:_SHOWN]} on the engine's machine"
            allowed = f"a folder with the same weights on all nodes; {name} is {sums}"
            raise ModelError("model", str(folder), allowed)


def _note_own_files(args: NodeArgs) -> NodeArgs:
    """With this machine's files, which were found equal, in the place of those of the engine's machine."""
    model = args.config.model
    noted = NotedFiles(weights=note_files(model.model, model.weight_files))
    model = msgspec.structs.replace(model, noted=noted)
    return msgspec.structs.replace(args, config=msgspec.structs.replace(args.config, model=model))


def _wait_for_end(group: WorkerGroup) -> int:
    """The exit code of the first rank that ends."""
    poller = select.poll()
    parent_fd = os.pidfd_open(os.getppid())
    for fd in (parent_fd, *(process.pid_fd for process in group.processes)):
        poller.register(fd, select.POLLIN)
    while not group.has_ended:
        check_at = group.next_check_at
        ready = dict(poller.poll(None if check_at is None else until_ms(check_at)))
        if parent_fd in ready:
            os._exit(EXIT_PARENT_LOST)  # Ray would leave by itself, but not while a thread is in here
        group.look(time.monotonic())
    os.close(parent_fd)
    return next(code for process in group.processes if (code := process.exit_code) is not None)


def compute_source_digest() -> str:
    """Equal for the same sources of Quire. Raises OSError."""
    return OwnSources().digest[:_SHOWN]
