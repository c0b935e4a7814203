"""A stand-in for the package ray, of the little that is used of it: a cluster of one node, which is here.

Its actors are threads of the process that asks for them. FAKE_RAY says what is wrong: "alone" (there is no
cluster), "small" (a node without a processor), "lost" (the node goes while the actor starts).
"""

from __future__ import annotations

import os
import sys
import types
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

_FAULT = os.environ.get("FAKE_RAY", "")
_RESOURCES = {"CPU": 0.0 if _FAULT == "small" else 64.0, "memory": 1.0}


class exceptions:
    class RayError(Exception):
        pass


class _Method:
    def __init__(self, threads: ThreadPoolExecutor, method: Any) -> None:
        self._threads, self._method = threads, method

    def remote(self) -> Future[Any]:
        if _FAULT == "lost":
            failed: Future[Any] = Future()
            failed.set_exception(exceptions.RayError("The actor died.\n\tits node"))
            return failed
        return self._threads.submit(self._method)


class _Actor:
    def __init__(self, instance: Any, max_concurrency: int) -> None:
        self._instance, self._threads = instance, ThreadPoolExecutor(max_concurrency)

    def __getattr__(self, name: str) -> _Method:
        return _Method(self._threads, getattr(self._instance, name))


class remote:
    def __init__(self, cls: type) -> None:
        self._cls = cls

    def options(self, *, max_concurrency: int, max_restarts: int, **where: Any) -> remote:
        assert max_restarts == 0
        assert where["scheduling_strategy"] == ("bundle", 0)
        assert where["num_cpus"] == 2
        self._max_concurrency = max_concurrency
        return self

    def remote(self, *args: Any) -> _Actor:
        return _Actor(self._cls(*args), self._max_concurrency)


class _Group(str):
    """A bundle's name; empty: there is no room for it."""

    def wait(self, timeout_s: float) -> bool:
        assert timeout_s > 0
        return bool(self)


def init(**options: Any) -> None:
    assert options["address"] == "auto"
    if _FAULT == "alone":
        raise ConnectionError("Could not find any running Ray instance.\nTo start one...")


def get(future: Future[Any], *, timeout: float | None) -> Any:
    return future.result(timeout)


def nodes() -> list[dict[str, Any]]:
    dead = {"Alive": False, "NodeManagerAddress": "192.0.2.1", "Resources": {"CPU": 64.0}}
    return [dead, {"Alive": True, "NodeManagerAddress": "127.0.0.1", "Resources": _RESOURCES}]


def available_resources() -> dict[str, float]:
    return _RESOURCES


def _placement_group(bundles: list[dict[str, float]], strategy: str, name: str) -> Any:
    assert strategy == "SPREAD"
    assert name
    (bundle,) = bundles
    has_room = all(_RESOURCES.get(kind, 0) >= number for kind, number in bundle.items())
    return _Group("bundle" if has_room else "")


util = types.ModuleType("ray.util")
util.get_node_ip_address = lambda: "127.0.0.1"
util.placement_group = _placement_group
util.scheduling_strategies = types.ModuleType("ray.util.scheduling_strategies")
util.scheduling_strategies.PlacementGroupSchedulingStrategy = lambda group, index: (str(group), index)
sys.modules["ray.util"] = util
sys.modules["ray.util.scheduling_strategies"] = util.scheduling_strategies
