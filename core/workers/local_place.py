"""LocalPlace: a worker on this machine: child processes, and a socket in the run directory."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import msgspec
import zmq

from ...ipc.processes.child_args import SPARE_ROLE, WORKER_MODULE, WorkerArgs
from ...ipc.processes.own_sources import check_own_sources
from ...ipc.processes.process import ChildProcess, ProcessHandle
from ...ipc.processes.spare import WarmSpare, find_spare_path
from ...ipc.protocol.sockets import NOBLOCK, WORKER_HEARTBEAT_TIMEOUT_MS, bind_router, has_message, send_to
from ...ipc.spec.config import EngineConfig
from .place import WorkerPlace
from .worker_group import name_roles

_LIFE_BYTES = 3
# Threads that wait for each other sleep instead of spinning: beside one busy process a step of two spinning
# threads took 7 to 10 times as long, and sleeping costs nothing measurable on an idle machine.
WORKER_ENV = {"OMP_WAIT_POLICY": "passive"}


class LocalPlace(WorkerPlace):
    """A process a rank behind a ROUTER, which is bound anew for each worker."""

    def __init__(self, config: EngineConfig, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        """`address` is the beginning of each worker's address."""
        self._roles = name_roles(config.parallel.num_ranks)
        self._context = context
        self._address = address
        self._life = secrets.token_hex(_LIFE_BYTES)
        _remove_sockets(address)
        self._num_opened = 0
        self._heartbeat_timeout_ms = WORKER_HEARTBEAT_TIMEOUT_MS if config.step_timeout_s else None
        self._socket: zmq.Socket[bytes] | None = None
        self._connection: zmq.Socket[bytes] | None = None  # the socket's monitor
        self._has_spare = config.recovery.warm_spare
        self._spare = WarmSpare(find_spare_path(address), self._start_spare)

    def open(self) -> None:
        self.close()
        self._num_opened += 1
        self._socket = bind_router(
            self._context, self._worker_address, heartbeat_timeout_ms=self._heartbeat_timeout_ms
        )
        self._connection = self._socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED, f"inproc://worker-{self._num_opened}"
        )

    def close(self) -> None:
        if self._socket is None or self._connection is None:
            return
        self._socket.disable_monitor()
        self._connection.close(linger=0)
        self._socket.close(linger=0)
        self._socket = self._connection = None
        # libzmq leaves the file there until its context ends, or for good.
        Path(self._worker_address.removeprefix("ipc://")).unlink(missing_ok=True)

    def start(self, rank: int, fd: int | None, config: EngineConfig) -> ProcessHandle:
        """Adopt the waiting spare, which an earlier core may have started, or start a new process."""
        check_own_sources()
        args = WorkerArgs(address=self._worker_address, rank=rank, config=config)
        if self._has_spare:
            spare = self._spare.adopt(self._roles[rank], msgspec.msgpack.encode(args))
            if spare is not None:
                return spare
        return start_rank(WORKER_MODULE, self._roles[rank], args, fd)

    @property
    def sockets(self) -> Sequence[zmq.Socket[bytes] | int]:
        return [socket for socket in (self._socket, self._connection) if socket is not None]

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        if self._socket is None or not has_message(self._socket):
            return None
        identity, *frames = self._socket.recv_multipart(NOBLOCK)
        return identity, frames

    def send(self, identity: bytes, frames: tuple[bytes]) -> None:
        assert self._socket is not None
        send_to(self._socket, identity, frames)

    def has_lost_connection(self) -> bool:
        if self._connection is None or not has_message(self._connection):
            return False
        self._connection.recv_multipart(NOBLOCK)
        return True

    def note_ready(self) -> None:
        if self._has_spare:
            self._spare.keep()

    def stop(self) -> None:
        self._spare.stop()

    @property
    def _worker_address(self) -> str:
        # libzmq removes a closed socket's file some time later, so the next socket needs another name; and a
        # late worker of an earlier core must not connect to this one.
        return f"{self._address}{self._life}{self._num_opened % 10}"

    def _start_spare(self, path: str) -> ChildProcess:
        return ChildProcess.start(WORKER_MODULE, SPARE_ROLE, path.encode(), make_worker_env())


def start_rank(module: str, role: str, args: WorkerArgs, fd: int | None) -> ChildProcess:
    """Start a worker's process; `fd` is the file that ranks share, None if there is none."""
    if fd is not None:
        args = msgspec.structs.replace(args, group_path=f"/proc/self/fd/{fd}")
    pass_fds = () if fd is None else (fd,)
    return ChildProcess.start(
        module, role, msgspec.msgpack.encode(args), make_worker_env(), pass_fds=pass_fds
    )


def make_worker_env() -> dict[str, str]:
    """What is added to this process's environment for a worker."""
    return {name: os.environ.get(name, value) for name, value in WORKER_ENV.items()}


def _remove_sockets(address: str) -> None:
    """Delete the socket files that an earlier core has left."""
    path = Path(address.removeprefix("ipc://"))
    for leftover in path.parent.glob(f"{path.name}*"):
        leftover.unlink(missing_ok=True)
