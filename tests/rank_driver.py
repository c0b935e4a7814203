"""Drives an executor of several ranks (fake_rank.py) as a core does: polls, takes events, submits steps."""

from __future__ import annotations

import time
from collections import deque

import zmq
from fakes import make_config
from msgspec.structs import replace
from quire.core.workers.executor import ExecutorEvent, ProcessExecutor, WorkerLost
from quire.core.workers.place import WorkerPlace
from quire.ipc.protocol.step import SchedulerOutput
from quire.ipc.spec.config import EngineConfig, ParallelConfig
from quire.ipc.spec.model_spec import ModelSpec


def make_rank_config(size: int, name: str = "fake", backend: str = "mp", **changes: object) -> EngineConfig:
    """Of so many ranks."""
    config = make_config()
    model = replace(config.model, served_model_name=name, spec=widen(config.model.spec, size))
    parallel = ParallelConfig(tensor_parallel_size=size, executor_backend=backend)
    return replace(config, model=model, parallel=parallel, **changes)


def widen(spec: ModelSpec, size: int) -> ModelSpec:
    """Of one layer with so much for each rank."""
    layer = spec.layers[0]
    attention, ffn = replace(layer.attention, num_heads=size), replace(layer.ffn, intermediate_size=size)
    return replace(spec, layers=(replace(layer, attention=attention, ffn=ffn),))


class Ranks:
    """An executor with its ranks, and the core's poll."""

    def __init__(self, config: EngineConfig, place: WorkerPlace) -> None:
        self.executor = ProcessExecutor(config, place)
        self.poller = zmq.Poller()
        self.executor.register(self.poller)
        self._events: deque[ExecutorEvent] = deque()
        self.seen: list[ExecutorEvent] = []
        self.executor.start()

    def follow(self, kind: type[ExecutorEvent], timeout_s: float = 10.0) -> ExecutorEvent:
        """The next event of this kind; it and those before it are in `seen`."""
        deadline = time.monotonic() + timeout_s
        while (now := time.monotonic()) < deadline:
            while self._events:
                self.seen.append(self._events.popleft())
                if isinstance(self.seen[-1], kind):
                    return self.seen[-1]
            look_at = min(deadline, self.executor.next_check_at or deadline)
            self.poller.poll(1 + max(0, int(1000 * (look_at - now))))
            self._events.extend(self.executor.receive())
        raise AssertionError(f"no {kind.__name__} within {timeout_s:g} s")

    def step(self, step_id: int) -> None:
        self.executor.submit(SchedulerOutput(step_id, [0, 1], [1, 1]))

    def lose(self) -> str:
        event = self.follow(WorkerLost)
        assert isinstance(event, WorkerLost)
        return event.reason

    def stop(self) -> None:
        self.executor.stop(0.0)
