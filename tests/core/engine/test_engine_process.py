"""The core's process and the clients over real sockets, with FakeWorker where a worker process would be."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from blocking_client import BlockingClient, make_client
from daemon_loads import Outputs, assert_undisturbed, collect
from daemons import wait_for_end
from fakes import make_config, make_request
from quire.core.faults.blame import MAX_DEATHS
from quire.frontend.client.async_engine_core_client import make_async_client
from quire.ipc.errors import EngineDeadError, ModelError
from quire.ipc.protocol.messages import (
    EngineCoreRequest,
    ErrorCode,
    FinishReason,
    UtilityMethod,
)
from quire.ipc.spec.config import RecoveryConfig

CONFIG = make_config()


pytestmark = pytest.mark.usefixtures("fake_core")


@pytest.fixture
def client() -> Iterator[BlockingClient]:
    client = make_client(CONFIG)
    yield client
    client.close()


def run(client: BlockingClient, requests: list[EngineCoreRequest], *others: EngineCoreRequest) -> Outputs:
    """What came of them all; `requests` have ended as they would have undisturbed."""
    client.add_requests([*requests, *others])
    outputs = collect(client, {request.request_id for request in (*requests, *others)})
    assert_undisturbed(requests, outputs)
    return outputs


def test_many_requests_come_back_whole_and_in_order(client: BlockingClient) -> None:
    requests = [make_request(f"r-{i}", [i + 1, 2, 3], max_tokens=1 + i % 20) for i in range(300)]
    run(client, requests)
    assert client.call_utility(UtilityMethod.CHECK_INTEGRITY).error is None
    stats = client.call_utility(UtilityMethod.STATS).stats
    assert stats is not None
    assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used) == (0, 0, 0)
    assert stats.generation_tokens_total == sum(1 + i % 20 for i in range(300))


def test_an_aborted_request_ends_once_with_abort() -> None:
    client = make_client(make_config(max_model_len=2000))  # so long that the abort comes before its end
    try:
        client.add_request(make_request("long", [1, 2], max_tokens=None))
        client.abort_requests(["long", "unknown"])
        assert collect(client, {"long"})["long"][-1].finish_reason == FinishReason.ABORT
        assert client.get_outputs(timeout_s=0.05) == []
    finally:
        client.close()


def test_a_failing_step_fails_its_request_and_the_engine_goes_on(client: BlockingClient) -> None:
    failed = run(client, [], make_request("poison-1", [1, 2]))["poison-1"][-1]
    assert failed.finish_reason == FinishReason.ERROR
    assert "poisoned" in (failed.error or "")
    run(client, [make_request("r-1", [5, 6], max_tokens=9)])


def test_startup_rows_add_up_to_no_more_than_the_start_took() -> None:
    before = time.time()
    client = make_client(CONFIG)
    elapsed = time.time() - before
    client.close()
    assert [phase for phase, _ in client.startup][:2] == ["start core process", "start core"]
    assert 0 < sum(seconds for _, seconds in client.startup) <= elapsed


def test_a_failed_start_raises_the_workers_error_and_leaves_nothing() -> None:
    model = msgspec.structs.replace(CONFIG.model, served_model_name="missing")
    with pytest.raises(ModelError, match="model='missing': expected a folder"):
        make_client(msgspec.structs.replace(CONFIG, model=model))


def test_a_request_that_kills_every_core_fails_alone(
    client: BlockingClient, capfd: pytest.CaptureFixture[str]
) -> None:
    requests = [make_request(f"r-{i}", [i + 1, 2], max_tokens=50) for i in range(20)]
    final = run(client, requests, make_request("crash-1", [55, 66, 77]))["crash-1"][-1]
    assert (final.error_code, final.error) == (
        ErrorCode.POISON_REQUEST,
        "2 engine cores died while it ran alone",
    )
    assert client.call_utility(UtilityMethod.CHECK_INTEGRITY).error is None
    lines = [line for line in capfd.readouterr().err.splitlines() if "poison request" in line]
    report = json.loads(lines[0].partition("poison request ")[2])
    assert (len(lines), report["request_id"], report["found_by"]) == (1, "crash-1", "core death")
    assert (report["num_prompt_tokens"], report["num_output_tokens"], report["num_attempts"]) == (3, 0, 4)


def test_several_requests_that_kill_every_core_fail_and_the_engine_goes_on(client: BlockingClient) -> None:
    requests = [make_request(f"r-{i}", [i + 1, 2], max_tokens=50) for i in range(5)]
    poison = [make_request(f"crash-{i}", [55]) for i in range(4)]
    outputs = run(client, requests, *poison)
    for request in poison:
        assert outputs[request.request_id][-1].error_code is ErrorCode.POISON_REQUEST


def test_a_request_that_kills_every_worker_fails_alone(client: BlockingClient) -> None:
    requests = [make_request(f"r-{i}", [i + 1, 2], max_tokens=50) for i in range(20)]
    final = run(client, requests, make_request("lethal-1", [1]))["lethal-1"][-1]
    assert final.error_code is ErrorCode.POISON_REQUEST
    assert "SIGKILL" in (final.error or "")


def test_requests_that_kill_workers_one_after_the_other_do_not_end_the_engine(client: BlockingClient) -> None:
    for i in range(6):
        (final,) = run(client, [], make_request(f"lethal-{i}", [1]))[f"lethal-{i}"]
        assert final.error_code is ErrorCode.POISON_REQUEST
        run(client, [make_request(f"r-{i}", [i, 2], max_tokens=9)])


def test_requests_that_kill_workers_late_fail_alone_and_the_engine_goes_on(client: BlockingClient) -> None:
    for i in range(3):
        requests = [make_request(f"r-{i}-{j}", [j + 1, 2], max_tokens=50) for j in range(5)]
        outputs = run(client, requests, make_request(f"late-{i}", [i + 1], max_tokens=50))
        assert outputs[f"late-{i}"][-1].error_code is ErrorCode.POISON_REQUEST


def test_a_worker_that_no_request_gets_through_ends_the_engine(client: BlockingClient) -> None:
    def ask_and_lose_workers() -> None:
        for i in range(MAX_DEATHS):
            run(client, [], make_request(f"lethal-{i}", [1]))

    with pytest.raises(EngineDeadError, match="SIGKILL, 4 times in 60 s"):
        ask_and_lose_workers()


def test_a_lost_worker_is_replaced_and_no_request_notices(client: BlockingClient) -> None:
    requests = [make_request(f"r-{i}", [i + 1, 2], max_tokens=100) for i in range(20)]
    outputs = run(client, [*requests, make_request("once-1", [7], max_tokens=20)])
    assert any(out[-1].times.num_preemptions for out in outputs.values() if out[-1].times)


def test_a_worker_that_fails_once_to_start_again_is_started_once_more(client: BlockingClient) -> None:
    run(client, [make_request("once-fails", [7], max_tokens=20)])


def test_a_worker_that_comes_back_with_fewer_blocks_costs_no_token(tmp_path: Path) -> None:
    model = msgspec.structs.replace(
        CONFIG.model, served_model_name="shrinks", model=str(tmp_path / "started")
    )
    with contextlib.closing(make_client(msgspec.structs.replace(CONFIG, model=model))) as client:
        core_pid = client.facts.pids["core"]
        run(client, [make_request("once-1", [7], max_tokens=20)])
        assert client.facts.pids["core"] != core_pid


def test_a_worker_that_cannot_start_again_ends_the_engine_with_its_cause(client: BlockingClient) -> None:
    client.add_request(make_request("once-failsalways", [7]))
    with pytest.raises(EngineDeadError, match="no memory just now, 4 times in 60 s"):
        client.get_outputs(timeout_s=10.0)


def test_a_worker_lost_more_often_than_allowed_ends_the_engine_with_its_cause() -> None:
    config = msgspec.structs.replace(CONFIG, recovery=RecoveryConfig(max_worker_restarts=0))
    with contextlib.closing(make_client(config)) as client:
        client.add_request(make_request("once-1", [1]))
        with pytest.raises(EngineDeadError, match="SIGKILL, once in 60 s"):
            client.get_outputs(timeout_s=10.0)


def test_a_core_lost_more_often_than_allowed_ends_the_engine_with_its_cause() -> None:
    config = msgspec.structs.replace(CONFIG, recovery=RecoveryConfig(max_core_restarts=1))
    with contextlib.closing(make_client(config)) as client:
        client.add_request(make_request("crash-1", [1]))
        with pytest.raises(EngineDeadError, match="code 7, 2 times in 60 s"):
            client.get_outputs(timeout_s=10.0)
        with pytest.raises(EngineDeadError, match="code 7"):
            client.add_request(make_request("r-2", [1]))


def test_close_ends_the_core_and_removes_its_files() -> None:
    client = make_client(CONFIG)
    pid = client.facts.pids["core"]
    run_dir = client.client._links.first.engine.run_dir.path
    client.add_request(make_request("r", [1], max_tokens=None))
    client.close()
    client.close()
    wait_for_end(pid)
    assert not run_dir.exists()


def test_a_killed_core_is_replaced_and_no_request_notices(client: BlockingClient) -> None:
    requests = [make_request(f"r-{i}", [i + 1, 2], max_tokens=100) for i in range(20)]
    for request in requests:
        client.add_request(request)
    core_pid = client.facts.pids["core"]
    os.kill(core_pid, signal.SIGKILL)
    assert_undisturbed(requests, collect(client, {request.request_id for request in requests}))
    assert client.facts.pids["core"] != core_pid


async def test_requests_that_come_at_any_moment_all_end() -> None:
    client = await make_async_client(CONFIG)
    waiting: dict[str, asyncio.Future[None]] = {}

    async def deliver() -> None:
        while True:
            for output in await client.get_outputs():
                if output.finish_reason is not None:
                    waiting.pop(output.request_id).set_result(None)

    async def request_in_a_loop(name: str) -> None:
        for i in range(60):  # sends and receives interleave in every way
            request_id = f"{name}-{i}"
            waiting[request_id] = asyncio.get_running_loop().create_future()
            client.add_request(make_request(request_id, [i + 1], max_tokens=1 + i % 7))
            await waiting[request_id]

    delivery = asyncio.create_task(deliver())
    await asyncio.gather(*(request_in_a_loop(f"loop{n}") for n in range(12)))
    assert not waiting
    delivery.cancel()
    client.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # from Python 3.12 on, with threads
def test_a_fork_of_the_owner_is_told_so(client: BlockingClient) -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            client.add_request(make_request("r", [1]))
        except EngineDeadError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert b"fork" in os.read(reader, 1000)
    os.close(reader)
    os.close(writer)
    run(client, [make_request("mine", [1, 2], max_tokens=5)])
