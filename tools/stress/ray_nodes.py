"""A Ray of a stress run's own, whose nodes this machine plays: who works there; another for a lost one."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psutil

from ...ipc.errors import ConfigError
from ...ipc.processes.child_args import PACKAGE_DIR
from .kills import Role

_STORE_BYTES = 80 << 20
_CPUS_OF_NODE = 4
_ACTOR, _WORKER = "ray::NodeGroup", "quire.worker"


class RayNodes:
    """A head that has no processors to give, and as many nodes as engines, but two at least."""

    def __init__(self, num_nodes: int) -> None:
        """Raises ConfigError if ray is not installed."""
        try:
            utils = importlib.import_module("ray.cluster_utils")
        except ImportError as error:
            allowed = f"`pip install quire[ray]` first ({error})"
            raise ConfigError("distributed_executor_backend", "ray", allowed) from None
        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": _STORE_BYTES}
        self._cluster: Any = utils.Cluster(initialize_head=True, head_node_args=head)
        self.address = str(self._cluster.address)
        self._raylets: list[int] = []
        for _ in range(max(2, num_nodes)):
            self._add()

    def find_pids(self, role: Role) -> list[int]:
        """Actors, workers below them, or the raylets of nodes with an actor."""
        actors = [pid for raylet in self._raylets for pid in _find_children(raylet, _ACTOR)]
        match role:
            case "actor":
                return actors
            case "node":
                return [raylet for raylet in self._raylets if _find_children(raylet, _ACTOR)]
            case _:
                return [pid for actor in actors for pid in _find_children(actor, _WORKER)]

    def replace(self, raylet: int) -> None:
        """A node was killed: another comes, as from a cluster's keeper."""
        self._raylets.remove(raylet)
        self._add()

    def find_left(self) -> list[str]:
        """What is left of engines that have ended."""
        return [f"an actor of Ray is left (pid {pid})" for pid in self.find_pids("actor")]

    def close(self) -> None:
        """End all nodes."""
        self._cluster.shutdown()

    def _add(self) -> None:
        node = self._cluster.add_node(num_cpus=_CPUS_OF_NODE, object_store_memory=_STORE_BYTES)
        self._raylets.append(node.all_processes["raylet"][0].process.pid)


@contextlib.contextmanager
def open_ray(num_nodes: int) -> Generator[RayNodes]:
    """A cluster that engines started in this block find, and whose nodes find this Quire."""
    added = {"PYTHONPATH": os.pathsep.join([str(Path(PACKAGE_DIR).parent), os.environ.get("PYTHONPATH", "")])}
    before = {name: os.environ.get(name) for name in (*added, "RAY_ADDRESS")}
    os.environ |= added
    nodes = RayNodes(num_nodes)
    os.environ["RAY_ADDRESS"] = nodes.address
    try:
        yield nodes
    finally:
        nodes.close()
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _find_children(pid: int, name: str) -> list[int]:
    with contextlib.suppress(psutil.Error):
        return [one.pid for one in psutil.Process(pid).children() if name in " ".join(one.cmdline())]
    return []
