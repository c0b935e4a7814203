"""Clients of two private engines, whose cores are real processes with FakeWorkers, and are killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator

import msgspec
import pytest
from blocking_client import BlockingClient, make_client
from daemon_loads import TIMEOUT_S, assert_undisturbed, collect, collect_some, finish, read_stats
from fakes import make_config, make_request
from quire.core.engine.engine_process import name_engine
from quire.ipc.errors import EngineDeadError, ModelError
from quire.ipc.processes.child_args import CoreArgs
from quire.ipc.processes.process import wait_readable
from quire.ipc.protocol.client_protocol import LOST_CALL
from quire.ipc.protocol.messages import (
    EngineCoreRequest,
    EngineRoster,
    ErrorCode,
    UtilityMethod,
    UtilityResult,
)
from quire.ipc.spec.config import EngineConfig, ParallelConfig, RecoveryConfig

pytestmark = pytest.mark.usefixtures("fake_core")


def make_pair(name: str = "paced", **recovery: int) -> EngineConfig:
    config = make_config(max_model_len=512)
    return msgspec.structs.replace(
        config,
        model=msgspec.structs.replace(config.model, served_model_name=name),
        parallel=ParallelConfig(data_parallel_size=2),
        recovery=RecoveryConfig(**recovery),
    )


@pytest.fixture
def client() -> Iterator[BlockingClient]:
    client = make_client(make_pair())
    yield client
    client.close()


def make_requests(prefix: str, count: int, max_tokens: int = 50) -> list[EngineCoreRequest]:
    return [make_request(f"{prefix}-{i}", [i + 1, 2, 3], max_tokens=max_tokens) for i in range(count)]


def count_generated(client: BlockingClient) -> dict[int, int]:
    """Engine -> tokens that it has generated since it started."""
    return {index: read_stats(client, index).generation_tokens_total for index in client.engines}


def kill_core(client: BlockingClient, index: int) -> None:
    os.kill(client.engines[index].pids["core"], signal.SIGKILL)


def test_requests_are_shared_and_end_with_their_tokens(client: BlockingClient) -> None:
    requests = make_requests("r", 40, max_tokens=20)
    client.add_requests(requests)
    finish(client, requests)
    assert count_generated(client) == {0: 400, 1: 400}
    client.add_request(make_request("long", [1, 2], max_tokens=200))
    client.abort_requests(["long"])
    assert str(collect(client, {"long"})["long"][-1].finish_reason) == "abort"


def test_a_killed_engines_requests_go_on_in_the_other_and_it_is_used_again(client: BlockingClient) -> None:
    requests = make_requests("r", 40)
    client.add_requests(requests)
    outputs = collect_some(client, 100)
    kill_core(client, 1)
    finish(client, requests, outputs)
    deadline = time.monotonic() + TIMEOUT_S
    while len(client.engines) < 2:
        assert time.monotonic() < deadline
        client.get_outputs(timeout_s=0.1)
    more = make_requests("more", 20, max_tokens=10)
    client.add_requests(more)
    finish(client, more)
    assert count_generated(client)[1] == 100


def test_a_call_ends_with_its_engine_and_one_of_any_is_made_of_another(client: BlockingClient) -> None:
    core = client.engines[0].pids["core"]
    os.kill(core, signal.SIGSTOP)

    async def call_both() -> list[UtilityResult]:
        calls = [asyncio.create_task(client.client.call_utility(UtilityMethod.STATS, of)) for of in (0, None)]
        await asyncio.sleep(0)
        os.kill(core, signal.SIGKILL)
        return [await call for call in calls]

    answers = client.run(call_both, TIMEOUT_S)
    assert [(one.error, one.stats is None) for one in answers] == [(LOST_CALL, True), (None, False)]


def test_a_request_that_kills_cores_is_convicted_after_as_many_as_with_one_engine(
    client: BlockingClient, capfd: pytest.CaptureFixture[str]
) -> None:
    requests = make_requests("r", 20, max_tokens=25)
    client.add_requests([*requests, make_request("crash-1", [55, 66, 77])])
    outputs = collect(client, {request.request_id for request in requests} | {"crash-1"})
    assert outputs["crash-1"][-1].error_code is ErrorCode.POISON_REQUEST
    assert_undisturbed(requests, outputs)
    errors = capfd.readouterr().err.splitlines()
    (line,) = [line for line in errors if "poison request" in line]
    assert json.loads(line.partition("poison request ")[2])["num_attempts"] == 4


def test_an_engine_that_is_lost_for_good_leaves_the_others_until_the_last() -> None:
    client = make_client(make_pair(max_core_restarts=0))
    try:
        requests = make_requests("r", 20)
        client.add_requests(requests)
        outputs = collect_some(client, 50)
        kill_core(client, 0)
        finish(client, requests, outputs)
        assert list(client.engines) == [1]
        client.add_request(make_request("last", [1], max_tokens=150))
        kill_core(client, 1)
        with pytest.raises(EngineDeadError, match="once in 60 s"):
            collect(client, {"last"})
    finally:
        client.close()


def test_one_that_does_not_start_fails_the_start() -> None:
    with pytest.raises(ModelError, match="model='missing'"):
        make_client(make_pair("missing"))


def test_closing_ends_them_all(client: BlockingClient) -> None:
    fds = [os.pidfd_open(facts.pids["core"]) for facts in client.engines.values()]
    client.close()
    with pytest.raises(EngineDeadError, match="closed"):
        client.add_requests(make_requests("late", 3))
    with pytest.raises(EngineDeadError, match="closed"):
        client.get_outputs()
    for fd in fds:
        assert wait_readable(fd, TIMEOUT_S)
        os.close(fd)


def test_the_lines_of_the_log_begin_with_the_number_of_an_engine_beside_others() -> None:
    config, roster = make_config(), EngineRoster([])
    alone = CoreArgs(client_address="", worker_address="", config=config)
    private = msgspec.structs.replace(alone, config=config.for_engine(1, 2))
    served = msgspec.structs.replace(private, engine_index=3, roster=roster)
    assert [name_engine(one) for one in (alone, private, served)] == [
        "quire",
        "quire engine 1",
        "quire engine 3",
    ]
