"""Clients of fake cores: requests of known tokens while something is done to the engines."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
from blocking_client import BlockingClient, attach_client
from daemon_client import make_requests
from daemons import wait_for_end, wait_until
from fakes import expected_output, make_config
from forked import ForkedProcess
from quire.ipc.daemon.daemon_state import EngineState, read_state
from quire.ipc.daemon.run_dir import find_named
from quire.ipc.protocol.engine_views import EngineSnapshot, SchedulerStats
from quire.ipc.protocol.messages import EngineCoreOutput, EngineCoreRequest, UtilityMethod
from quire.ipc.spec.config import EngineConfig, RecoveryConfig

TIMEOUT_S = 20.0

Outputs = dict[str, list[EngineCoreOutput]]


def make_named_config(name: str, model: str = "fake") -> EngineConfig:
    """Of a fake core that does what its name says (fake_core.py)."""
    config = make_config(max_model_len=512, block_size=64)
    return msgspec.structs.replace(
        config, model=msgspec.structs.replace(config.model, served_model_name=name, model=model)
    )


PACED = make_named_config("paced")


def make_group_config(num_engines: int, name: str = "paced", max_core_restarts: int = 5) -> EngineConfig:
    recovery = RecoveryConfig(max_core_restarts=max_core_restarts)
    config = msgspec.structs.replace(make_named_config(name), recovery=recovery, log_level="INFO")
    return config.for_engine(0, num_engines)


def read_engines(name: str) -> dict[int, EngineState]:
    """A daemon's engines by number."""
    state = read_state(find_named(name))
    return {} if state is None else {engine.index: engine for engine in state.engines}


def wait_for_engines(
    name: str, is_so: Callable[[dict[int, EngineState]], object] | None = None
) -> dict[int, EngineState]:
    """Until they are as they should be, which is ready."""
    is_so = is_so or (lambda engines: all(engine.state == "ready" for engine in engines.values()))
    assert wait_until(lambda: is_so(read_engines(name)), TIMEOUT_S), read_engines(name)
    return read_engines(name)


def strike(name: str, *indexes: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Kill or stop these engines' cores, all at once."""
    engines = read_engines(name)
    for pid in [engines[index].pid for index in indexes]:
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def collect(client: BlockingClient, ids: set[str], outputs: Outputs | None = None) -> Outputs:
    """Outputs per request, added to those that have come, until each of `ids` has ended."""
    outputs = {} if outputs is None else outputs
    live = ids - {name for name, own in outputs.items() if own[-1].finish_reason is not None}
    deadline = time.monotonic() + TIMEOUT_S
    while live:
        assert time.monotonic() < deadline, f"waiting for {sorted(live)}"
        for output in client.get_outputs(timeout_s=1.0):
            outputs.setdefault(output.request_id, []).append(output)
            if output.finish_reason is not None:
                live.remove(output.request_id)
    return outputs


def assert_undisturbed(requests: list[EngineCoreRequest], outputs: Outputs) -> None:
    """Merged by position, every request has the tokens of an undisturbed run, and one end."""
    for request in requests:
        merged: list[int] = []
        own = outputs[request.request_id]
        for output in own:
            num_known = len(merged) - output.start
            assert num_known >= 0, f"{request.request_id} has a gap at {len(merged)}"
            assert merged[output.start :] == output.new_token_ids[:num_known], "a token has changed"
            merged += output.new_token_ids[num_known:]
        tokens, reason = expected_output(request, PACED.model.max_model_len)
        assert merged == tokens
        assert [output.finish_reason for output in own if output.finish_reason is not None] == [reason]


def collect_some(client: BlockingClient, num_outputs: int = 1, outputs: Outputs | None = None) -> Outputs:
    """So many more outputs, so that what comes then comes in the middle."""
    outputs = {} if outputs is None else outputs
    num_outputs += sum(map(len, outputs.values()))
    while sum(map(len, outputs.values())) < num_outputs:
        batch = client.get_outputs(timeout_s=TIMEOUT_S)
        assert batch, "no output came"
        for output in batch:
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def finish(client: BlockingClient, requests: list[EngineCoreRequest], outputs: Outputs | None = None) -> None:
    """Wait for requests that were added, and see that nothing has disturbed them."""
    assert_undisturbed(requests, collect(client, {request.request_id for request in requests}, outputs))


def ask(client: BlockingClient, prefix: str, count: int = 4, max_tokens: int = 20) -> None:
    """Add requests, and `finish` them."""
    requests = make_requests(prefix, count, max_tokens)
    client.add_requests(requests)
    finish(client, requests)


def look(client: BlockingClient, engine: int | None = None) -> EngineSnapshot:
    snapshot = client.call_utility(UtilityMethod.SNAPSHOT, engine=engine).snapshot
    assert snapshot is not None
    return snapshot


def read_stats(client: BlockingClient, engine: int | None = None) -> SchedulerStats:
    stats = client.call_utility(UtilityMethod.STATS, engine=engine).stats
    assert stats is not None
    return stats


def is_idle(client: BlockingClient, engine: int | None = None) -> bool:
    stats = read_stats(client, engine)
    return (stats.num_running, stats.num_waiting, stats.kv_blocks_used, stats.held_bytes) == (0, 0, 0, 0)


class Load(threading.Thread):
    """An attached client with requests, in a thread of its own."""

    def __init__(self, name: str, requests: list[EngineCoreRequest]) -> None:
        super().__init__(daemon=True)
        self.outputs: Outputs = {}
        self.error: BaseException | None = None
        self.requests = requests
        self._client = attach_client(name, "LLM")

    def run(self) -> None:
        try:
            for request in self.requests:
                self._client.add_request(request)
            collect(self._client, {request.request_id for request in self.requests}, self.outputs)
            assert self._client.get_outputs(timeout_s=0.05) == []
        except BaseException as error:
            self.error = error
        finally:
            self._client.close()

    @property
    def num_tokens(self) -> int:
        return sum(len(o.new_token_ids) for outputs in list(self.outputs.values()) for o in outputs)

    def finish(self) -> Outputs:
        self.join(TIMEOUT_S)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error
        return self.outputs


def make_loads(name: str, count: int, max_tokens: int = 100) -> list[Load]:
    """Two clients with `count` requests."""
    return [Load(name, make_requests(prefix, count, max_tokens)) for prefix in ("a", "b")]


@contextlib.contextmanager
def under_load(name: str, count: int = 32, max_tokens: int = 150) -> Iterator[list[Load]]:
    """A sync and an async client with `count` requests each; afterwards all must have ended undisturbed."""
    loads = make_loads(name, count, max_tokens)
    for load in loads:
        load.start()
    yield loads
    for load in loads:
        assert_undisturbed(load.requests, load.finish())


def wait_for_tokens(loads: list[Load], count: int) -> None:
    """Until each has received that many tokens; fails if one has ended."""
    assert wait_until(lambda: all(load.num_tokens >= count or load.error for load in loads), TIMEOUT_S)
    assert all(load.is_alive() for load in loads), [load.error for load in loads]


class Script:
    """A client process (daemon_client.py). `more`: its further arguments."""

    def __init__(self, name: str, prefix: str, count: int, max_tokens: int, *more: str) -> None:
        self._requests = make_requests(prefix, count, max_tokens)
        arguments = [name, prefix, str(count), str(max_tokens), *more]
        reader, writer = os.pipe()
        self._process = ForkedProcess(["daemon_client", *arguments], stdout=writer)
        os.close(writer)
        self._output = open(reader)  # noqa: SIM115
        self.pid = self._process.pid

    def read_line(self) -> str:
        return self._output.readline().strip()

    def wait_until_busy(self) -> None:
        assert [self.read_line(), self.read_line()] == ["attached", "busy"]

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int | None:
        """Its exit code, once it has ended."""
        wait_for_end(self.pid, TIMEOUT_S)
        return self._process.wait()

    def assert_undisturbed(self) -> None:
        """It ends with the tokens of an undisturbed run."""
        tokens = json.loads(self.read_line())
        max_model_len = PACED.model.max_model_len
        assert tokens == {r.request_id: expected_output(r, max_model_len)[0] for r in self._requests}

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self.send_signal(signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._output):
            stream.close()
