"""The ranks of a group as threads of this process, each with its own part of a model."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

from msgspec.structs import replace
from quire.ipc.config import EngineConfig
from quire.kernels.shared_group import GroupAborted, SharedGroup

Result = TypeVar("Result")
_TIMEOUT_S = 60.0


def run_ranks(
    size: int,
    act: Callable[[SharedGroup], Result],
    make: Callable[[str, int, int], SharedGroup] = SharedGroup,
) -> list[Result]:
    """What `act` returns in each rank. When one raises, so do the others, and its error is raised here.

    `make` returns a rank's group for a path, its number and how many there are.
    """
    fd = os.memfd_create("group")
    try:

        def run(rank: int) -> Result:
            group = make(f"/proc/self/fd/{fd}", rank, size)
            try:
                return act(group)
            except Exception as error:
                group.abort(str(error))
                raise

        with ThreadPoolExecutor(size) as threads:
            futures = [threads.submit(run, rank) for rank in range(size)]
            wait(futures, _TIMEOUT_S)
            for future in sorted(futures, key=lambda one: isinstance(one.exception(0), GroupAborted)):
                future.result(0)
            return [future.result(0) for future in futures]
    finally:
        os.close(fd)


def with_ranks(config: EngineConfig, size: int, **parallel: Any) -> EngineConfig:
    """The config of an engine whose model so many ranks share."""
    return replace(config, parallel=replace(config.parallel, tensor_parallel_size=size, **parallel))
