"""ServerParts: what an HTTP process has once, however many engines it serves. Knows none of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from ....ipc.params.pooling_params import PoolingParams
from ....ipc.params.sampling_params import SamplingParams
from ...outputs import RequestOutput
from ...requests.vectors.outputs import PoolingOutput, PoolingRequestOutput
from ..caller import TenantUsage
from ..errors import unavailable
from ..jobs.registry import ResponseRegistry
from ..options import ServerOptions

# A request's id, its parameters, and what it was answered.
TellPooled = Callable[[str, PoolingParams, Sequence[PoolingRequestOutput[PoolingOutput]]], None]


class ServerParts:
    """One a server. `drain` when it is about to end, `close` at last."""

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.created = int(time.time())
        self.is_draining = False
        self.on_drain: list[Callable[[], None]] = []  # ends streams that have no end of their own
        self.on_output: list[Callable[[RequestOutput, SamplingParams], None]] = []  # told finished outputs
        self.on_pooled: list[TellPooled] = []  # told the vectors of a request
        self.responses = ResponseRegistry(options.limits)
        self.answer_bytes = TenantUsage()  # of answers under way, whatever engine makes them
        self.tasks: set[asyncio.Task[Any]] = set()  # what a drain waits for

    def run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do something that no connection waits for, and a drain does."""
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def drain(self) -> None:
        """No new request enters from now on; those under way go on."""
        self.is_draining = True
        for end in self.on_drain:
            end()

    def close(self) -> None:
        """Keep no response any more. Idempotent."""
        self.responses.close()

    def check_open(self) -> None:
        """ApiError 503 once the server is about to end."""
        if self.is_draining:
            raise unavailable("the server is about to end", "shutting_down")
