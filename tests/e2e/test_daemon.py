"""One daemon, shared by frontends of several kinds; then things die.

Its worker is fake (fake_process.py), and in slow runs the real one of the pocket model too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from blocking_client import attach_client
from daemons import Daemon, fake_modules, runtime_folders, wait_for_end, wait_until
from fake_process import MODULE
from generated import find_tokens
from quire import LLM, AsyncLLM, EngineArgs, SamplingParams
from quire.frontend.daemon import inspect_daemon
from quire.ipc.daemon.run_dir import find_named, find_owner
from quire.ipc.errors import ConfigError, DaemonError
from quire.ipc.protocol.messages import UtilityMethod
from served import Served

NAME = "shared"
PROMPTS = ["Once upon a time", "The little fox", "One day, a", "What is 3 plus 4?", "Lily went to the"]
TIMEOUT_S = 60.0

Tokens = list[list[int]]


def make_params(first_seed: int, count: int, max_tokens: int = 100) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=1.0, seed=first_seed + i, max_tokens=max_tokens, ignore_eos=True)
        for i in range(count)
    ]


def make_prompts(count: int) -> list[str]:
    return [PROMPTS[i % len(PROMPTS)] for i in range(count)]


@pytest.fixture(scope="module", params=["fake", pytest.param("real", marks=pytest.mark.slow)])
def daemon(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    config = EngineArgs(
        max_model_len=512, num_gpu_blocks_override=1024, enable_prefix_caching=False
    ).create_engine_config()
    workers = fake_modules(MODULE) if request.param == "fake" else contextlib.nullcontext()
    with runtime_folders(), workers, Daemon(NAME, config) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def llm(daemon: Daemon) -> Iterator[LLM]:
    with LLM(attach=daemon.name) as llm:
        yield llm


@pytest.fixture(autouse=True)
def idle_afterwards(daemon: Daemon) -> Iterator[None]:
    yield
    if find_owner(find_named(daemon.name)) is None:
        return  # the test has ended it
    with contextlib.closing(attach_client(daemon.name, "test")) as client:

        def is_idle() -> bool:
            stats = client.call_utility(UtilityMethod.STATS).stats
            return stats is not None and (stats.num_running, stats.kv_blocks_used) == (0, 0)

        assert wait_until(is_idle, 3.0)
        assert client.call_utility(UtilityMethod.CHECK_INTEGRITY).error is None


def generate(llm: LLM, params: list[SamplingParams]) -> Tokens:
    outputs = llm.generate(make_prompts(len(params)), params, use_tqdm=False)
    assert [output.error for output in outputs] == [None] * len(params)
    return find_tokens(outputs)


async def generate_async(engine: AsyncLLM, params: list[SamplingParams]) -> Tokens:
    async def run(prompt: str, own: SamplingParams) -> list[int]:
        return [list(o.outputs[0].token_ids) async for o in engine.generate(prompt, own)][-1]

    pairs = zip(make_prompts(len(params)), params, strict=True)
    return await asyncio.gather(*(run(prompt, own) for prompt, own in pairs))


class Background(threading.Thread):
    """A call in a thread, with its result."""

    def __init__(self, call: Any, *args: Any) -> None:
        super().__init__(daemon=True)
        self._call, self._args = call, args
        self._result: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._result = self._call(*self._args)
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        self.join(TIMEOUT_S)
        assert not self.is_alive()
        if self._error is not None:
            raise self._error
        return self._result


def run_async_client(name: str, params: list[SamplingParams]) -> Tokens:
    async def run() -> Tokens:
        async with AsyncLLM(attach=name) as engine:
            return await generate_async(engine, params)

    return asyncio.run(run())


def wait_for_running(client: LLM, count: int) -> None:
    """Until that many requests run."""
    snapshot = client.llm_engine.snapshot
    assert wait_until(lambda: snapshot().stats.num_running >= count, TIMEOUT_S)


SCRIPT = """
import sys, time
began = time.monotonic()
from quire import LLM, SamplingParams
llm = LLM(attach=sys.argv[1])
elapsed_s = time.monotonic() - began
print("attached", elapsed_s, *(set(sys.modules) & {"torch", "transformers", "numpy"}), flush=True)
params = [SamplingParams(seed=i, max_tokens=int(sys.argv[2]), ignore_eos=True) for i in range(8)]
outputs = llm.generate(["Once upon a time"] * 8, params, use_tqdm=False)
import json
print(json.dumps([list(output.outputs[0].token_ids) for output in outputs]), flush=True)
"""


def start_script(max_tokens: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), NAME, str(max_tokens)],
        stdout=subprocess.PIPE,
        text=True,
    )


def read_script(script: subprocess.Popen[str]) -> list[str]:
    assert script.stdout is not None
    return script.stdout.readline().split()


def test_attaching_is_quick_and_loads_nothing_heavy(daemon: Daemon) -> None:
    with start_script(3) as script:
        word, seconds, *heavy = read_script(script)
        assert (word, heavy) == ("attached", [])
        print(f"attach with imports: {float(seconds):.3f} s")
        assert len(json.loads("".join(read_script(script)))) == 8
    began = time.monotonic()
    with LLM(attach=daemon.name) as llm:
        print(f"attach: {time.monotonic() - began:.3f} s")
        assert llm.llm_engine.facts.pids["core"] == daemon.core_pid


def test_a_killed_frontend_leaves_the_others_tokens_alone_and_can_come_back(daemon: Daemon, llm: LLM) -> None:
    core_pid, worker_pid = daemon.core_pid, llm.llm_engine.facts.pids["worker"]
    mine, theirs = make_params(100, 5), make_params(200, 5)
    alone = generate(llm, mine), generate(llm, theirs)
    with start_script(480) as victim:
        assert read_script(victim)[0] == "attached"
        sync, awaited = Background(generate, llm, mine), Background(run_async_client, daemon.name, theirs)
        with LLM(attach=daemon.name) as third:
            wait_for_running(third, 18)
            info = inspect_daemon(daemon.name)
            assert info is not None
            assert (info.state, info.clients, info.restarts) == ("ready", 4, 0)
            assert {p.role: p.pid for p in info.processes}["worker"] == worker_pid
            victim.kill()
        assert (sync.result(), awaited.result()) == alone
    assert daemon.core_pid == core_pid
    with start_script(5) as again:
        assert read_script(again)[0] == "attached"
        assert [len(ids) for ids in json.loads("".join(read_script(again)))] == [5] * 8


def test_a_script_an_async_client_and_a_server_share_the_engine_and_one_is_killed(
    daemon: Daemon, llm: LLM
) -> None:
    core_pid = daemon.core_pid
    mine = make_params(500, 5)
    alone = generate(llm, mine)
    texts = [one.outputs[0].text for one in llm.generate(make_prompts(len(mine)), mine, use_tqdm=False)]
    served = Served("--attach", daemon.name)
    try:
        with start_script(480) as victim:
            assert read_script(victim)[0] == "attached"
            awaited = Background(run_async_client, daemon.name, mine)
            over_http = Background(ask_server, served, mine)
            wait_for_running(llm, 12)
            victim.kill()
        assert (awaited.result(), over_http.result()) == (alone, texts)
    finally:
        assert served.stop() == 0
    assert daemon.core_pid == core_pid
    assert generate(llm, mine) == alone


def ask_server(served: Served, params: list[SamplingParams]) -> list[str]:
    """The texts of the same requests, asked for over HTTP one after the other."""
    client = served.client()
    answers = [
        client.completions.create(
            model="pocket",
            prompt=prompt,
            max_tokens=one.max_tokens,
            temperature=one.temperature,
            seed=one.seed,
            extra_body={"ignore_eos": True, "top_p": 1.0},
        )
        for prompt, one in zip(make_prompts(len(params)), params, strict=True)
    ]
    return [answer.choices[0].text for answer in answers]


@pytest.mark.slow
def test_a_killed_worker_and_a_killed_core_cost_no_token(daemon: Daemon, llm: LLM) -> None:
    mine, theirs = make_params(300, 5, 200), make_params(400, 5, 200)
    alone = generate(llm, mine), generate(llm, theirs)
    before = daemon.num_restarts
    sync, awaited = Background(generate, llm, mine), Background(run_async_client, daemon.name, theirs)
    with LLM(attach=daemon.name) as looker:
        for role in ("worker", "core"):
            wait_for_running(looker, 10)
            assert inspect_daemon(daemon.name).restarts == before
            pids = {process.role: process.pid for process in inspect_daemon(daemon.name).processes}
            os.kill(pids[role], signal.SIGKILL)
            wait_for_end(pids[role])
        assert (sync.result(), awaited.result()) == alone
        assert daemon.num_restarts == before + 1
        wait_for_end(pids["worker"])
        looker.stats()  # this client was idle all the time, and finds the new engine


def test_logprobs_over_a_restart_are_complete_and_equal(daemon: Daemon, llm: LLM) -> None:
    params = [
        SamplingParams(
            temperature=0.0, max_tokens=120, ignore_eos=True, logprobs=2, prompt_logprobs=1, min_tokens=i
        )
        for i in range(4)
    ]

    def run() -> list[Any]:
        outputs = llm.generate(make_prompts(4), params, use_tqdm=False)
        return [
            (
                list(o.outputs[0].token_ids),
                describe(o.prompt_logprobs),
                describe(o.outputs[0].logprobs),
                [o.prompt_token_ids, o.outputs[0].finish_reason],
            )
            for o in outputs
        ]

    def describe(positions: Any) -> list[Any]:
        """Each position's token ids and ranks, and its logprobs to what the batch's shape may change."""
        return [
            None if p is None else {i: (lp.rank, pytest.approx(lp.logprob, abs=1e-3)) for i, lp in p.items()}
            for p in positions
        ]

    alone = run()
    before = daemon.num_restarts
    running = Background(run)
    with LLM(attach=daemon.name) as looker:
        wait_for_running(looker, 4)
        assert wait_until(lambda: looker.stats().generation_tokens_total > 0, TIMEOUT_S)
        os.kill(daemon.core_pid, signal.SIGKILL)
    assert running.result() == alone
    assert daemon.num_restarts == before + 1
    for tokens, prompt_logprobs, logprobs, (prompt_ids, _) in alone:
        assert len(tokens) == len(logprobs) == 120
        assert len(prompt_logprobs) == len(prompt_ids)


def test_arguments_that_configure_an_engine_are_refused_beside_attach(daemon: Daemon) -> None:
    for arguments in ({"model": "pocket"}, {"max_model_len": 5}, {"no_such": 1}):
        with pytest.raises(ConfigError, match="not given with attach"):
            LLM(attach=daemon.name, **arguments)
    with pytest.raises(ConfigError, match="client_weight=0"):
        LLM(attach=daemon.name, client_weight=0.0)
    with pytest.raises(DaemonError, match="no daemon named 'shard' is running, did you mean 'shared'"):
        LLM(attach="shard")
    with pytest.raises(ConfigError, match=r"name='\.\./x'"):
        AsyncLLM(attach="../x") and LLM(attach="../x")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", range(3))
def test_kills_of_anything_at_any_time_cost_no_token(daemon: Daemon, llm: LLM, seed: int) -> None:
    rng = random.Random(seed)
    mine, theirs = make_params(1000 * seed, 12, 300), make_params(1000 * seed + 500, 12, 300)
    alone = generate(llm, mine), generate(llm, theirs)
    supervisor = psutil.Process(daemon.pid)
    assert wait_until(lambda: inspect_daemon(daemon.name).state == "ready", TIMEOUT_S)
    num_fds = supervisor.num_fds()
    sync, awaited = Background(generate, llm, mine), Background(run_async_client, daemon.name, theirs)
    num_kills = {"core": 0, "worker": 0, "client": 0}
    while sync.is_alive() or awaited.is_alive():
        role = rng.choice(["core", "worker", "client"])
        if num_kills[role] >= 3:
            break
        with start_script(400) as script:
            assert read_script(script)[0] == "attached"
            threading.Event().wait(rng.random())  # any moment will do
            if role != "client":
                pids = {process.role: process.pid for process in inspect_daemon(daemon.name).processes}
                with contextlib.suppress(ProcessLookupError, KeyError):  # away just now
                    os.kill(pids[role], signal.SIGKILL)
            script.kill()
        num_kills[role] += 1
    assert (sync.result(), awaited.result()) == alone
    assert wait_until(lambda: inspect_daemon(daemon.name).state == "ready", TIMEOUT_S)
    assert wait_until(lambda: supervisor.num_fds() == num_fds, 3.0)


def test_a_killed_supervisor_takes_core_and_worker_with_it(daemon: Daemon) -> None:
    pids = [process.pid for process in inspect_daemon(daemon.name).processes]
    assert len(pids) == 3
    os.kill(daemon.pid, signal.SIGKILL)
    for pid in pids:
        wait_for_end(pid, 2.0)
