"""The launcher: `python -m quire.core.network.ray.launcher`, which stands for a worker that Ray has placed.

A child of the core, as a worker here would be: it ends as the worker ends, and its end is the worker's, since
Ray ends what a process has asked for when that is gone, however it went. The core stays free of Ray, whose
library ends its process when the node's raylet is lost.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import select
import signal
import threading
import time
from pathlib import Path
from typing import NoReturn

import msgspec
import zmq

from ....ipc.decoding import decode_msgpack
from ....ipc.errors import EngineStartError, ModelError, QuireError, raise_remote
from ....ipc.files.file_identity import check_loaded
from ....ipc.files.file_samples import hash_samples
from ....ipc.network.keys import ClientKeys
from ....ipc.network.tcp_address import TcpAddress
from ....ipc.processes.process import (
    EXIT_NODE_LOST,
    EXIT_START_FAILED,
    Lifeline,
    catch_signals,
)
from ....ipc.protocol.codec import make_step_codec
from ....ipc.protocol.sockets import connect_dealer
from ....ipc.protocol.step import WorkerFailed, WorkerProgress
from ....ipc.spec.config import EngineConfig
from .node_group import NodeArgs, NodeEnd, NodeGroup, NodeReport, compute_source_digest
from .ray_cluster import (
    ACTOR_TIMEOUT_S,
    NodeLostError,
    RayActor,
    RayCluster,
    Resources,
    format_resources,
    load_ray,
)

_log = logging.getLogger(__name__)

LAUNCHER_IDENTITY = b"launcher"
_LINGER_MS = 500


class LaunchArgs(msgspec.Struct, frozen=True, kw_only=True):
    """A worker to be placed: where its core listens on this machine, and what it is to load."""

    port: int
    keys: ClientKeys
    config: EngineConfig
    module: str  # of a worker's process


class Launcher:
    """From the start of a worker elsewhere to its end."""

    def __init__(self, args: LaunchArgs, signals: int) -> None:
        """`signals` becomes readable when the core wants the worker's stacks."""
        self._args = args
        self._signals = signals
        self._codec = make_step_codec()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        address = str(TcpAddress("127.0.0.1", args.port))
        self._core = connect_dealer(
            self._context.socket(zmq.DEALER), address, LAUNCHER_IDENTITY, keys=args.keys
        )

    def run(self) -> int:
        """Place the worker and wait for its end: its exit code, or what stands for it."""
        try:
            host, actor = self._place()
        except NodeLostError as error:
            return self._fail(EngineStartError(f"no worker could start on a Ray node: {error}"))
        except QuireError as error:
            return self._fail(error)
        try:
            end = self._follow(actor)
        except NodeLostError as error:
            _log.error("the node %s, or Ray there, was lost: %s", host, error)
            return EXIT_NODE_LOST
        _log.error("on %s: %s", host, end.reason)
        return end.exit_code

    def _place(self) -> tuple[str, RayActor]:
        """A node that can run the worker, and the actor there. Raises QuireError and NodeLostError."""
        self._note("import ray")
        cluster = RayCluster(load_ray())
        resources = find_resources(
            self._args.config, has_gpu=any("GPU" in node["Resources"] for node in cluster.nodes)
        )
        missing = "" if cluster.has_room(resources) else f" ({cluster.describe(resources)})"
        self._note(f"wait for a Ray node with {format_resources(resources)}{missing}")
        bundle = cluster.reserve(resources)
        self._note("start an actor")
        args = msgspec.msgpack.encode(self._make_node_args(cluster.host))
        actor = cluster.start(NodeGroup, args, resources, bundle)
        report = decode_msgpack(actor.call("check", ACTOR_TIMEOUT_S), NodeReport)
        if report.error:
            raise_remote(report.kind, f"on the node {report.host}: {report.error}")
        self._note(f"start worker on {report.host}")
        return report.host, actor

    def _make_node_args(self, host: str) -> NodeArgs:
        args, model = self._args, self._args.config.model
        check_loaded(model.noted, model.model, model.tokenizer)
        try:
            weights = {name: hash_samples(Path(model.model, name)) for name in model.weight_files}
        except OSError as error:
            raise ModelError("model", model.model, f"a folder whose weights can be read ({error})") from None
        return NodeArgs(
            address=str(TcpAddress(host, args.port)),
            keys=args.keys,
            config=args.config,
            module=args.module,
            sources=compute_source_digest(),
            weights=weights,
        )

    def _follow(self, actor: RayActor) -> NodeEnd:
        """Wait for the worker's end, and have it write its stacks when the core asks for them."""
        ended = os.eventfd(0, os.EFD_CLOEXEC)
        outcome: list[NodeEnd | NodeLostError] = []

        def wait() -> None:
            try:
                outcome.append(decode_msgpack(actor.call("run"), NodeEnd))
            except NodeLostError as error:
                outcome.append(error)
            os.eventfd_write(ended, 1)

        threading.Thread(target=wait, name="actor", daemon=True).start()
        poller = select.poll()
        for fd in (ended, self._signals):
            poller.register(fd, select.POLLIN)
        while ended not in (ready := dict(poller.poll())):
            if self._signals in ready:
                os.read(self._signals, 64)
                actor.tell("dump_stacks")
        (end,) = outcome
        if isinstance(end, NodeLostError):
            raise end
        return end

    def _note(self, phase: str) -> None:
        self._send(WorkerProgress(phase, time.time()))

    def _fail(self, error: QuireError) -> int:
        self._send(WorkerFailed(str(error), type(error).__name__))
        self._context.destroy(linger=_LINGER_MS)
        return EXIT_START_FAILED

    def _send(self, message: msgspec.Struct) -> None:
        self._core.send_multipart(self._codec.encode(message))


def find_resources(config: EngineConfig, *, has_gpu: bool) -> Resources:
    """What Ray is asked for on one node: for each rank as many CPUs as it has threads, one if that is not
    said, or a GPU.
    """
    parallel = config.parallel
    if parallel.is_on_gpu or (parallel.device == "auto" and has_gpu):
        return {"GPU": parallel.num_ranks}
    return {"CPU": parallel.num_ranks * (parallel.num_threads or 1)}


def _end_as(code: int) -> NoReturn:
    """End this process as another has ended, by its exit code or signal."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it would be of nothing that anybody looks for
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else EXIT_NODE_LOST)


def main() -> NoReturn:
    """Entry point."""
    lifeline = Lifeline()
    lifeline.watch(grace_s=0.0)
    signals = catch_signals(signal.SIGUSR1)
    args = decode_msgpack(lifeline.args, LaunchArgs)
    logging.basicConfig(level=args.config.log_level, format="quire worker: %(message)s")
    _end_as(Launcher(args, signals.fileno()).run())


if __name__ == "__main__":
    main()
