"""RayPlace: a worker on a node that Ray chooses, spoken to over TCP with keys that are made for it alone."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import zmq

from ....ipc.network.keys import ClientGrant, ClientKeys, make_key_pairs
from ....ipc.network.tcp_address import open_everywhere, read_place
from ....ipc.processes.child_args import WORKER_MODULE
from ....ipc.processes.process import ChildProcess, ProcessHandle
from ....ipc.protocol.sockets import NODE_HEARTBEAT_TIMEOUT_MS, has_message
from ....ipc.spec.config import EngineConfig
from ...clients.origin import to_remote_identity, to_socket_identity
from ...workers.place import WorkerPlace
from ..network_listener import NetworkListener
from .launcher import LAUNCHER_IDENTITY, LaunchArgs

LAUNCHER_MODULE = "quire.core.network.ray.launcher"


class RayPlace(WorkerPlace):
    """All ranks are one process here, the launcher, which is heard as the rank that speaks for them."""

    is_elsewhere = True

    def __init__(self, config: EngineConfig) -> None:
        self._heartbeat_timeout_ms = NODE_HEARTBEAT_TIMEOUT_MS if config.step_timeout_s else None
        self._speaker = f"worker-{config.parallel.speaker}".encode()
        self._network: NetworkListener | None = None
        self._port = 0
        self._keys: ClientKeys | None = None

    def open(self) -> None:
        self.close()
        server, self._keys = make_key_pairs()
        find_grant = {self._keys.public: ClientGrant()}.get
        with open_everywhere() as listener:  # which of this machine's addresses nodes reach, Ray knows
            self._port = read_place(listener).port
            self._network = NetworkListener(
                listener.fileno(), server, find_grant, heartbeat_timeout_ms=self._heartbeat_timeout_ms
            )

    def close(self) -> None:
        if self._network is not None:
            self._network.stop()
            self._network = None

    def start(self, rank: int, fd: int | None, config: EngineConfig) -> ProcessHandle:
        del rank, fd
        assert self._keys is not None
        # Other engines share the cluster, not the node.
        parallel = msgspec.structs.replace(config.parallel, data_parallel_size=1, data_parallel_rank=0)
        config = msgspec.structs.replace(config, parallel=parallel)
        args = LaunchArgs(port=self._port, keys=self._keys, config=config, module=WORKER_MODULE)
        return ChildProcess.start(LAUNCHER_MODULE, "worker", msgspec.msgpack.encode(args))

    @property
    def sockets(self) -> Sequence[zmq.Socket[bytes] | int]:
        return [] if self._network is None else [self._network.router, self._network.lost_fd]

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        if self._network is None or not has_message(self._network.router):
            return None
        message = next(self._network.receive(), None)
        if message is None:
            return None
        identity = to_socket_identity(message[0])
        return self._speaker if identity == LAUNCHER_IDENTITY else identity, message[1]

    def send(self, identity: bytes, frames: tuple[bytes]) -> None:
        assert self._network is not None
        assert self._keys is not None
        self._network.send(to_remote_identity(identity, self._keys.public), frames)

    def has_lost_connection(self) -> bool:
        return self._network is not None and self._network.has_lost_one()

    def note_ready(self) -> None:
        """There is no spare elsewhere."""

    def stop(self) -> None:
        """Nothing is kept between workers."""
