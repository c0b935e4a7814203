"""RayCluster: the little of Ray that is used, and what it is asked for. Only launchers load ray."""

from __future__ import annotations

import contextlib
import importlib
import re
import secrets
import threading
from collections.abc import Mapping
from typing import Any

from ....ipc.errors import ConfigError, EngineStartError, describe_install

BACKEND = "distributed_executor_backend"
CONNECT_TIMEOUT_S = 30.0  # Ray itself tries for minutes where nobody answers
PLACE_TIMEOUT_S = 30.0  # Ray knows after some 20 s that a node was lost, and places anew
ACTOR_TIMEOUT_S = 60.0  # a process that imports ray; 2 s on an idle node
_START_HINT = "`ray start --head` here, or `ray start --address=HOST:PORT` to join one, begins it"

Resources = Mapping[str, float]


class NodeLostError(Exception):
    """The node, or Ray's process on it, is gone."""


class RayActor:
    """A NodeGroup on a node. Calls raise NodeLostError when it is gone."""

    def __init__(self, ray: Any, handle: Any) -> None:
        self._ray = ray
        self._handle = handle

    def call(self, method: str, timeout_s: float | None = None) -> Any:
        """Call a method and wait for what it returns, None: for ever."""
        try:
            return self._ray.get(getattr(self._handle, method).remote(), timeout=timeout_s)
        except self._ray.exceptions.RayError as error:
            raise NodeLostError(_find_cause(error)) from None

    def tell(self, method: str) -> None:
        """Call a method and wait for nothing."""
        with contextlib.suppress(self._ray.exceptions.RayError):
            getattr(self._handle, method).remote()


class RayCluster:
    """The cluster that this machine belongs to. What it is asked for is gone when this process ends."""

    def __init__(self, ray: Any) -> None:
        """`ray` is the module. Raises ConfigError if there is no cluster."""
        self._ray = ray
        failure: list[str] = [f"it did not answer within {CONNECT_TIMEOUT_S:g} s"]
        connecting = threading.Thread(target=self._connect, args=(failure,), name="connect", daemon=True)
        connecting.start()
        connecting.join(CONNECT_TIMEOUT_S)
        if failure:
            text = f"a Ray cluster that this machine belongs to ({failure[-1]}); {_START_HINT}"
            raise ConfigError(BACKEND, "ray", text)

    def _connect(self, failure: list[str]) -> None:
        """`failure` is emptied, or gets another reason."""
        try:
            # Of several clusters RAY_ADDRESS names one, as for all of Ray's programs.
            self._ray.init(address="auto", namespace="quire", logging_level="ERROR", log_to_driver=False)
        except Exception as error:  # whatever it is, there is no cluster
            failure.append(_first_line(error))
        else:
            failure.clear()

    @property
    def host(self) -> str:
        """This machine's address for the nodes."""
        return str(self._ray.util.get_node_ip_address())

    @property
    def nodes(self) -> list[dict[str, Any]]:
        """The nodes that Ray takes for alive."""
        return [node for node in self._ray.nodes() if node["Alive"]]

    def reserve(self, resources: Resources) -> Any:
        """A bundle on one node, of those with room on the emptiest. Raises EngineStartError, saying what is
        missing, when there is none for PLACE_TIMEOUT_S.
        """
        name = f"quire-{secrets.token_hex(6)}"
        group = self._ray.util.placement_group([dict(resources)], strategy="SPREAD", name=name)
        if group.wait(PLACE_TIMEOUT_S):
            return group
        lacking = f"no Ray node had {format_resources(resources)} within {PLACE_TIMEOUT_S:g} s"
        raise EngineStartError(f"{lacking}; {self.describe(resources)}")

    def describe(self, names: Resources) -> str:
        """What of these resources each node has, and what is free of them all."""
        total = [
            f"{node['NodeManagerAddress']} has {format_resources(_pick(node['Resources'], names))}"
            for node in self.nodes
        ]
        free = format_resources(_pick(self._ray.available_resources(), names))
        return f"{', '.join(total)}; free in all: {free}"

    def has_room(self, resources: Resources) -> bool:
        """Whether any node would do if nothing else ran there."""
        return any(
            all(node["Resources"].get(name, 0.0) >= number for name, number in resources.items())
            for node in self.nodes
        )

    def start(self, actor_class: type, args: bytes, resources: Resources, group: Any) -> RayActor:
        """Start an actor in a bundle. Raises NodeLostError later, from its calls."""
        where = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, 0)
        options = self._ray.remote(actor_class).options(
            num_cpus=resources.get("CPU", 0),
            num_gpus=resources.get("GPU", 0),
            max_concurrency=2,
            max_restarts=0,
            scheduling_strategy=where,
        )
        return RayActor(self._ray, options.remote(args))


def load_ray() -> Any:
    """The module. Raises ConfigError that names the extra."""
    try:
        ray = importlib.import_module("ray")
        importlib.import_module("ray.util.scheduling_strategies")
    except ImportError as error:
        raise ConfigError(BACKEND, "ray", f"only with: {describe_install('ray')} ({error})") from None
    return ray


def format_resources(resources: Resources) -> str:
    """'CPU 4, GPU 1'."""
    return ", ".join(f"{name} {number:g}" for name, number in resources.items())


def _pick(there: Mapping[str, float], names: Resources) -> Resources:
    return {name: there.get(name, 0.0) for name in names}


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _find_cause(error: Exception) -> str:
    """The last exception that Ray's report of several pages names, its first line if it names none."""
    causes = re.findall(r"^\w*(?:Error|Exception): .*", str(error), re.MULTILINE)
    return causes[-1] if causes else _first_line(error)
