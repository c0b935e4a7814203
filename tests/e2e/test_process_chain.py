"""The default chain, frontend - core process - worker process, on the model that ships with Quire."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from daemons import wait_for_end
from generated import find_tokens
from quire import LLM, AsyncLLM, EngineArgs, RequestOutputKind, SamplingParams
from quire.frontend.client import engines
from quire.ipc.daemon.run_dir import find_base

PROMPTS = ["Once upon a time", "The little fox", "One day, a", "What is 3 plus 4?", "Lily went to the"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_model_len=512) as llm:
        yield llm


def generate(
    llm: LLM, params: SamplingParams | list[SamplingParams], prompts: Any = PROMPTS
) -> list[list[int]]:
    return find_tokens(llm.generate(prompts, params, use_tqdm=False))


def test_the_frontend_loads_no_torch_and_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
    script = textwrap.dedent("""
        import sys, psutil
        from quire import LLM, SamplingParams
        from quire.frontend.client import engines
        engines.CORE_MODULE = "fake_core"  # which worker computes makes no difference here
        with LLM(max_model_len=512) as llm:
            llm.generate(["Once upon a time"] * 8, SamplingParams(max_tokens=32), use_tqdm=False)
            heavy = [name for name in ("torch", "transformers", "numpy") if name in sys.modules]
            print(psutil.Process().memory_info().rss / 1e6, *heavy)
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    rss_mb, *heavy = done.stdout.split()
    assert heavy == []
    assert float(rss_mb) < 80


def test_the_process_chain_and_one_process_give_the_same_tokens(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.9, top_p=0.95, seed=i, max_tokens=24) for i in range(len(PROMPTS))]
    with LLM(max_model_len=512, distributed_executor_backend="uni") as single:
        assert generate(llm, params) == generate(single, params)


def test_a_seeded_request_gives_the_same_tokens_alone_and_in_a_crowd(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, top_k=40, seed=11, max_tokens=40)
    alone = generate(llm, params, PROMPTS[0])
    crowd = [SamplingParams(temperature=1.0, max_tokens=5 + i) for i in range(40)]
    together = generate(llm, [params, *crowd], [PROMPTS[0], *(PROMPTS[i % 5] for i in range(40))])
    assert together[0] == alone[0]


def test_unseeded_requests_differ_and_two_greedy_sequences_are_equal(llm: LLM) -> None:
    [output] = llm.generate("Once upon a time", SamplingParams(n=4, max_tokens=30), use_tqdm=False)
    assert len({tuple(c.token_ids) for c in output.outputs}) > 1
    assert [c.index for c in output.outputs] == [0, 1, 2, 3]
    [output] = llm.generate("Once upon a time", SamplingParams(n=2, temperature=0), use_tqdm=False)
    assert output.outputs[0].token_ids == output.outputs[1].token_ids


def test_outputs_come_in_input_order_with_mixed_prompts(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    ids = tokenizer.encode(PROMPTS[1])
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 3, 6)]
    outputs = llm.generate([PROMPTS[0], ids, {"prompt": PROMPTS[2]}], params, use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [9, 3, 6]
    assert outputs[1].prompt_token_ids == ids


def test_a_bad_request_disturbs_nobody(llm: LLM) -> None:
    good = SamplingParams(temperature=0, max_tokens=8)
    expected = generate(llm, good)
    for prompts, params in [
        ("", good),
        ([[1, 2, 10**6]], good),
        (["x"], SamplingParams(stop_token_ids=[10**6])),
        ([[5] * 512], good),
        (["good", ""], good),
    ]:
        with pytest.raises(ValueError, match="="):
            llm.generate(prompts, params, use_tqdm=False)
    assert generate(llm, good) == expected
    assert llm.stats().num_running == 0


def test_async_requests_stream_and_a_cancelled_one_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    # The tests of `quire serve` have an AsyncLLM over a real worker.
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
    monkeypatch.setattr(engines, "CORE_MODULE", "fake_core")

    async def run() -> None:
        engine = AsyncLLM.from_engine_args(EngineArgs(max_model_len=512, served_model_name="paced"))
        if asyncio.iscoroutine(engine):
            engine = await engine
        params = SamplingParams(temperature=0, max_tokens=20, output_kind=RequestOutputKind.DELTA)

        async def text_of(prompt: str, request_id: str) -> str:
            return "".join([out.outputs[0].text async for out in engine.generate(prompt, params, request_id)])

        texts = await asyncio.gather(*(text_of(p, f"r-{i}") for i, p in enumerate(PROMPTS)))
        assert texts == [await text_of(p, f"again-{i}") for i, p in enumerate(PROMPTS)]

        endless = SamplingParams(max_tokens=400, ignore_eos=True)
        stream = engine.generate(PROMPTS[0], endless, "endless")
        await anext(stream)
        await stream.aclose()
        async with asyncio.timeout(10):
            while (await engine.stats()).num_running:
                pass
        engine.shutdown()

    asyncio.run(run())


def test_threads_take_turns(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=12)
    expected = generate(llm, params)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: generate(llm, params), range(8)))
    assert results == [expected] * 8


def test_a_request_that_cannot_be_sent_leaves_nothing_behind(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = llm.llm_engine
    with monkeypatch.context() as patched:
        patched.setattr(engine._client, "add_requests", lambda _requests: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.add_request("bad", "Once", SamplingParams(n=2))
    assert not engine.has_unfinished_requests()
    engine.add_request("bad", "Once", SamplingParams(max_tokens=3))  # its id is free again
    while engine.has_unfinished_requests():
        engine.step()


@pytest.mark.slow  # beside test_exact.py's, under requests of every kind
def test_a_killed_worker_costs_no_token(llm: LLM) -> None:
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=200, ignore_eos=True) for i in range(16)]
    prompts = [PROMPTS[i % 5] for i in range(16)]
    expected = generate(llm, params, prompts)
    engine = llm.llm_engine
    ids = [f"k-{i}" for i in range(16)]
    for request_id, prompt, param in zip(ids, prompts, params, strict=True):
        engine.add_request(request_id, prompt, param)
    tokens: dict[str, list[int]] = {}
    worker_pid = engine.facts.pids["worker"]
    has_killed = False
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
        if not has_killed and sum(map(len, tokens.values())) > 300:
            os.kill(worker_pid, signal.SIGKILL)
            has_killed = True
    assert has_killed
    assert [tokens[request_id] for request_id in ids] == expected


@pytest.mark.slow  # beside test_exact.py's, and test_engine_process.py's of what is left
def test_a_killed_core_is_replaced_and_leaves_nothing(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    undisturbed = llm.generate("Once", params, use_tqdm=False)[0].outputs[0].token_ids
    pids = llm.llm_engine.facts.pids
    killer = threading.Timer(0.05, os.kill, (pids["core"], signal.SIGKILL))
    killer.start()
    assert llm.generate("Once", params, use_tqdm=False)[0].outputs[0].token_ids == undisturbed
    killer.join()
    assert llm.generate("Once", params, use_tqdm=False)[0].outputs[0].token_ids == undisturbed
    wait_for_end(pids["worker"], timeout_s=2.0)
    assert llm.llm_engine.facts.pids["core"] != pids["core"]


SCRIPTS = {
    "leaves with": "with LLM(max_model_len=512) as llm: use(llm)",
    "ends": "llm = LLM(max_model_len=512); use(llm)",
    "deletes": "llm = LLM(max_model_len=512); use(llm); del llm; print('deleted', flush=True)",
    "raises": "llm = LLM(max_model_len=512); use(llm); raise SystemError('mine')",
    "dies": "llm = LLM(max_model_len=512); use(llm); os.kill(os.getpid(), 9)",
    "hard exit": "llm = LLM(max_model_len=512); use(llm); os._exit(3)",
    "in a thread": "t = threading.Thread(target=lambda: use(LLM(max_model_len=512))); t.start(); t.join()",
    "ctrl-c": (
        "llm = LLM(max_model_len=512); use(llm); print('busy', flush=True)\n"
        "llm.generate(['a'] * 200, SamplingParams(max_tokens=400, ignore_eos=True), use_tqdm=False)"
    ),
}
# Of this one the worker has a process; the others have a core with a fake one in it.
WAYS_WITH_WORKER = ("dies",)
# Whose means another one has: the others close an engine, leave it to the interpreter's end, or are cut off.
SLOW_WAYS = ("ends", "raises", "hard exit")
PRELUDE = """
import os, threading, psutil
from quire import LLM, SamplingParams
from quire.frontend.client import engines
def use(llm):
    llm.generate("Once", SamplingParams(max_tokens=2), use_tqdm=False)
    print(*(c.pid for c in psutil.Process().children(recursive=True)), flush=True)
"""


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.slow] if way in SLOW_WAYS else []) for way in SCRIPTS]
)
def test_however_a_script_ends_its_children_are_gone_within_two_seconds(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="q", dir="/tmp") as folder:  # nobody else's directories in it
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
        check_that_nothing_stays(way)


def check_that_nothing_stays(way: str) -> None:
    core = "fake_process" if way in WAYS_WITH_WORKER else "fake_core"
    with subprocess.Popen(
        [sys.executable, "-c", f"{PRELUDE}\nengines.CORE_MODULE = {core!r}\n{SCRIPTS[way]}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as script:
        assert script.stdout is not None
        pids = [int(pid) for pid in script.stdout.readline().split()]
        assert len(pids) == (2 if way in WAYS_WITH_WORKER else 1)
        if way == "ctrl-c":
            assert script.stdout.readline() == "busy\n"
            script.send_signal(signal.SIGINT)
        code = script.wait(timeout=2.0 + 2.0)
        assert (code == -signal.SIGINT) == (way == "ctrl-c")
        for pid in pids:
            wait_for_end(pid, timeout_s=2.0)
    if way != "dies" and way != "hard exit":
        assert list(find_base().iterdir()) == []
