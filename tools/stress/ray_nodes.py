"""A Ray of a stress run's own, whose nodes this machine plays: who works there; another for a lost one."""

from __future__ import annotations

import contextlib
import importlib
import os
import tempfile
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import psutil

from ...ipc.errors import ConfigError, EngineStartError, describe_install
from ...ipc.processes.own_sources import PACKAGE_DIR
from .kills import Role

_STORE_BYTES = 80 << 20
_CPUS_OF_NODE = 4
_OWNER = "XDG_RUNTIME_DIR"  # by which a run finds what its daemon has left
_ACTOR, _WORKER = "ray::NodeGroup", "quire.worker"


class RayNodes:
    """A head that has no processors to give, and as many nodes as engines, but two at least."""

    def __init__(self, num_nodes: int) -> None:
        """Raises ConfigError if ray is not installed, EngineStartError if a node of it does not start."""
        try:
            utils = importlib.import_module("ray.cluster_utils")
        except ImportError as error:
            allowed = f"only with: {describe_install('ray')} ({error})"
            raise ConfigError("distributed_executor_backend", "ray", allowed) from None
        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": _STORE_BYTES}
        self._cluster: Any = utils.Cluster(initialize_head=True, head_node_args=head)
        self.address = str(self._cluster.address)
        self._folder = os.environ.get(_OWNER)  # nodes that come later are not of the daemon's folder either
        self._raylets: list[int] = []
        try:
            for _ in range(max(2, num_nodes)):
                self._add()
        except Exception as error:  # of a busy machine; Ray gives a node 30 s
            self.close()
            raise EngineStartError(f"a node of Ray did not start: {error}") from None

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
        with _set_environment({_OWNER: self._folder}):
            node = self._cluster.add_node(num_cpus=_CPUS_OF_NODE, object_store_memory=_STORE_BYTES)
        self._raylets.append(node.all_processes["raylet"][0].process.pid)


@contextlib.contextmanager
def open_ray(num_nodes: int) -> Generator[RayNodes]:
    """A cluster that engines started in this block find, and whose nodes find this Quire."""
    with contextlib.ExitStack() as stack:
        path = os.pathsep.join([stack.enter_context(link_package()), os.environ.get("PYTHONPATH", "")])
        stack.enter_context(_set_environment({"PYTHONPATH": path, "RAY_ADDRESS": None}))
        nodes = stack.enter_context(contextlib.closing(RayNodes(num_nodes)))
        os.environ["RAY_ADDRESS"] = nodes.address
        yield nodes


@contextlib.contextmanager
def link_package() -> Generator[str]:
    """A folder for PYTHONPATH, with nothing but this Quire: its own may be called otherwise, and lie beside
    another that is called quire."""
    with tempfile.TemporaryDirectory(prefix="q") as folder:
        Path(folder, __name__.partition(".")[0]).symlink_to(PACKAGE_DIR, target_is_directory=True)
        yield folder


@contextlib.contextmanager
def _set_environment(values: Mapping[str, str | None]) -> Generator[None]:
    """For a while; None: without it."""
    before = {name: os.environ.get(name) for name in values}
    _update_environment(values)
    try:
        yield
    finally:
        _update_environment(before)


def _update_environment(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def _find_children(pid: int, name: str) -> list[int]:
    with contextlib.suppress(psutil.Error):
        return [one.pid for one in psutil.Process(pid).children() if name in " ".join(one.cmdline())]
    return []
