"""AsyncLLM belongs to one event loop: what calls from others, from threads, from a fork and after it do."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from frontend_fakes import FakeClient, prompt_ids
from quire.frontend import engine_start
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.options.engine_args import EngineArgs
from quire.frontend.requests import input_processor
from quire.ipc.errors import EngineDeadError, WrongEventLoopError
from quire.ipc.params.sampling_params import SamplingParams
from quire.ipc.protocol.messages import EngineCoreRequest

TIMEOUT_S = 20.0


def countdown(request: EngineCoreRequest) -> list[int]:
    return list(range(prompt_ids(request)[-1], 1, -1))


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> AsyncLLM:
    async def make_client(_config: Any, _on_phase: Any) -> FakeClient:
        return FakeClient(countdown)

    monkeypatch.setattr(engine_start, "make_async_client", make_client)
    return AsyncLLM.from_engine_args(EngineArgs())


def client_of(llm: AsyncLLM) -> FakeClient:
    client: Any = llm._client
    assert isinstance(client, FakeClient)
    return client


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, TIMEOUT_S))


def in_thread(work: Callable[[], Any]) -> Awaitable[Any]:
    return asyncio.get_running_loop().run_in_executor(None, work)


async def generate(llm: AsyncLLM, start: int = 6) -> list[int]:
    outputs = [output async for output in llm.generate([start], SamplingParams(max_tokens=500))]
    return outputs[-1].outputs[0].token_ids


def calls_of(llm: AsyncLLM) -> list[Callable[[], Coroutine[Any, Any, Any]]]:
    calls: list[Callable[[], Coroutine[Any, Any, Any]]] = [
        lambda: generate(llm),
        lambda: llm.abort("x"),
        llm.start,
        llm.__aenter__,
        llm.stats,
        llm.snapshot,
        llm.metrics,
        llm.reset_prefix_cache,
        llm.wait_until_dead,
    ]
    return calls


async def count_refusals(llm: AsyncLLM, kind: type[Exception], text: str) -> int:
    count = 0
    for call in calls_of(llm):
        try:
            await asyncio.wait_for(call(), TIMEOUT_S)
        except kind as error:
            count += text in str(error)
    return count


async def test_calls_from_another_threads_event_loop_say_so_and_disturb_nobody(llm: AsyncLLM) -> None:
    stream = llm.generate([60], SamplingParams(max_tokens=500))
    await anext(stream)
    refused = await in_thread(lambda: run(count_refusals(llm, WrongEventLoopError, "event loop")))
    assert refused == len(calls_of(llm))
    with pytest.raises(WrongEventLoopError):
        await in_thread(lambda: run(stream.__anext__()))
    last = await generate(llm, 60)
    assert last == list(range(60, 1, -1))
    llm.shutdown()


async def test_a_generator_that_another_event_loop_closes_is_aborted_in_its_own(llm: AsyncLLM) -> None:
    stream = llm.generate([500], SamplingParams(max_tokens=500), "mine")
    await anext(stream)
    client = client_of(llm)
    threads: list[int] = []
    abort = client.abort_requests

    def note_thread(ids: list[str]) -> None:
        threads.append(threading.get_ident())
        abort(ids)

    client.abort_requests = note_thread
    closing = threading.Thread(target=lambda: run(stream.aclose()))
    closing.start()
    closing.join()  # without a turn of this loop, in which the request might finish
    while not threads:
        await asyncio.sleep(0)
    assert threads == [threading.get_ident()]
    assert client.engine.aborted == [request.request_id for request in client.engine.added]
    assert await generate(llm, 4) == [4, 3, 2]
    llm.shutdown()


async def test_shutdown_from_another_thread_ends_every_reader(llm: AsyncLLM) -> None:
    readers = [asyncio.create_task(generate(llm)) for _ in range(3)]
    await llm.start()
    client = client_of(llm)
    client.is_paused = True
    while len(client.engine.added) < 3:
        await asyncio.sleep(0)
    threads: list[int] = []
    client.close = lambda: threads.append(threading.get_ident())
    await in_thread(llm.shutdown)
    assert threads == [threading.get_ident()]
    for reader in readers:
        with pytest.raises(EngineDeadError, match="shut down"):
            await reader


async def test_shutdown_while_it_starts_leaves_no_engine(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = FakeClient(countdown)

    async def make_client(_config: Any, _on_phase: Any) -> FakeClient:
        llm.shutdown()
        return client

    monkeypatch.setattr(engine_start, "make_async_client", make_client)
    with pytest.raises(EngineDeadError, match="shut down"):
        await llm.start()
    assert client.num_closed == 1


async def test_readers_are_told_when_the_task_that_reads_the_engine_is_cancelled(llm: AsyncLLM) -> None:
    await llm.start()
    client_of(llm).is_paused = True
    reader = asyncio.create_task(generate(llm))
    await asyncio.sleep(0)
    llm._requests.stop()
    with pytest.raises(EngineDeadError, match="cancelled"):
        await reader
    llm.shutdown()


async def test_an_engine_that_dies_while_a_prompt_is_tokenized_is_told_to_its_reader(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_processor, "_LONG_TEXT", 3)
    await llm.start()
    has_died = threading.Event()
    process = llm._input_processor.process

    def process_late(*args: Any, **keywords: Any) -> Any:
        has_died.wait(TIMEOUT_S)
        return process(*args, **keywords)

    llm._input_processor.process = process_late
    reader = asyncio.create_task(anext(llm.generate("the fox", SamplingParams())))
    await asyncio.sleep(0)
    client_of(llm).error = EngineDeadError("the core is gone")
    await llm.wait_until_dead()
    has_died.set()
    with pytest.raises(EngineDeadError, match="the core is gone"):
        await reader
    llm.shutdown()


@pytest.fixture
def real(fake_core: None) -> AsyncLLM:  # noqa: ARG001
    """One whose core is real, with a fake worker that takes 2 ms a step."""
    args = EngineArgs(skip_tokenizer_init=True, served_model_name="paced", max_model_len=512)
    return AsyncLLM.from_engine_args(args)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # from Python 3.12 on, with threads
async def test_a_fork_is_told_so_and_cannot_make_its_parents_loop_deaf(real: AsyncLLM) -> None:
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    stream = real.generate([5], params)
    await anext(stream)
    pid = os.fork()
    if pid == 0:
        os._exit(use_in_fork(real))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    last = [output async for output in stream][-1]
    assert len(last.outputs[0].token_ids) == 100
    pending = asyncio.create_task(real.stats())
    await asyncio.sleep(0)
    real.shutdown()
    with pytest.raises(EngineDeadError, match="closed"):
        await pending  # at once, though its answer will never come


_EXITS_IN_A_FORK = """
import asyncio, os, sys, time
from quire import AsyncLLM, EngineArgs, SamplingParams
from quire.frontend.client import engines

engines.CORE_MODULE = "fake_core"

async def main():
    args = EngineArgs(skip_tokenizer_init=True, served_model_name="paced", max_model_len=512)
    llm = AsyncLLM.from_engine_args(args)
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    stream = llm.generate({"prompt_token_ids": [5]}, params, "a")
    await anext(stream)
    time.sleep(0.2)  # outputs come, and the loop has yet to read them when the process forks
    await asyncio.sleep(0)
    pid = os.fork()
    if pid == 0:
        sys.exit(3)
    status = await asyncio.to_thread(os.waitpid, pid, 0)
    last = [output async for output in stream][-1]
    print(os.waitstatus_to_exitcode(status[1]), len(last.outputs[0].token_ids))
    llm.shutdown()

asyncio.run(main())
"""


@pytest.mark.usefixtures("fake_core")
def test_a_fork_that_exits_in_a_coroutine_ends_and_leaves_its_parents_loop_alone() -> None:
    command = [sys.executable, "-W", "ignore", "-c", _EXITS_IN_A_FORK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "3 100\n"), done.stderr


def use_in_fork(llm: AsyncLLM) -> int:
    """How many calls do not say that this is a fork."""
    signal.alarm(10)  # rather than hang
    num_told: list[int] = []
    thread = threading.Thread(
        target=lambda: num_told.append(asyncio.run(count_refusals(llm, EngineDeadError, "fork")))
    )
    thread.start()
    thread.join()
    with contextlib.suppress(Exception):
        llm.shutdown()  # leaves the parent's engine alone
        return len(calls_of(llm)) - num_told[0]
    return 99
