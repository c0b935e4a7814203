"""A start compiles every kernel that serving needs: counted by Triton's launcher, without a GPU."""

from __future__ import annotations

import itertools
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from checkpoints import Recipe, make_checkpoint
from fakes import make_config
from quire.ipc.spec.config import EngineConfig, SchedulerConfig
from quire.worker.steps import warm_up
from quire.worker.steps.warm_up import WarmUp

pytest.importorskip("triton")

_TIMEOUT_S = 240.0
pytestmark = pytest.mark.timeout(_TIMEOUT_S + 10)

# Serves steps as they come: prompts in parts beside decodes, all ways to sample, any number of rows. Each
# configuration in a fork of its own: imports, which take as long as the rest, are done once.
_SCRIPT = """
import json, logging, os, random, sys
sys.path.insert(0, sys.argv[1])
from quire.tools.gpu.counted_launches import count_launches
compiled = count_launches()
import msgspec, torch
from quire.ipc.spec.config import EngineConfig
from quire.ipc.params.sampling_params import SamplingParams
from quire.kernels.triton import triton_runtime
from quire.worker.worker import Worker
from row_driver import Driver, make_prompt

triton_runtime.DEVICE_TYPES = frozenset({"cpu"})
messages = []
handler = logging.Handler()
handler.emit = lambda record: messages.append(record.getMessage())
logging.getLogger("quire").addHandler(handler)
logging.getLogger("quire").setLevel(logging.INFO)
kinds = [
    dict(temperature=0.0), dict(temperature=0.7), dict(temperature=0.7, top_p=0.8), dict(min_p=0.1),
    dict(frequency_penalty=0.5), dict(temperature=0.0, logprobs=2), dict(prompt_logprobs=1),
    dict(min_tokens=3, stop_token_ids=[3]), dict(temperature=0.5, top_k=3, repetition_penalty=1.2),
]

def serve(config):
    worker = Worker(config, lambda phase: None)
    worker.start()
    at_start = len(compiled)
    driver = Driver(config)
    driver.runner = worker._runner
    random.seed(1)
    for number in range(60):
        for name in [name for name in driver.requests if random.random() < 0.1]:
            driver.free(name)
        for row in range(config.scheduler.max_num_seqs):
            taken = {request.row for request in driver.requests.values()}
            if row not in taken and row not in driver._freed and random.random() < 0.3:
                params = SamplingParams(seed=row, **random.choice(kinds))
                driver.enter(f"{number}-{row}", row, make_prompt(random.randint(1, 30), seed=number), params)
                driver._free_blocks = list(range(90))
        step = {}
        for name, request in driver.requests.items():
            left = min(request.num_known - request.num_computed, random.randint(1, 20))
            if left and request.num_known < 60 and random.random() < 0.8:
                step[name] = min(left, 48 - sum(step.values()))
        step = {name: count for name, count in step.items() if count > 0}
        if step:
            driver._free_blocks = list(range(90))
            driver.step(step)
    return at_start, compiled[at_start:], messages

for config in msgspec.json.decode(sys.argv[2], type=list[EngineConfig]):
    pid = os.fork()
    if pid == 0:
        print(json.dumps(serve(config)), flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
"""


def serve(configs: list[EngineConfig]) -> list[tuple[int, list[str], list[str]]]:
    """Of each (kernels compiled at the start, what was compiled after it, log lines)."""
    tests = Path(__file__).parents[2]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["QUIRE_NATIVE_KERNELS"] = "0"
    script = [sys.executable, "-P", "-c", _SCRIPT, str(tests), msgspec.json.encode(configs).decode()]
    done = subprocess.run(script, env=env, capture_output=True, text=True, timeout=_TIMEOUT_S)
    served = [json.loads(line) for line in done.stdout.splitlines()]
    assert (done.returncode, len(served)) == (0, len(configs)), done.stderr[-3000:]
    return served


def test_nothing_is_compiled_while_serving(tmp_path: Path) -> None:
    recipe = Recipe(family="qwen3", num_layers=1, vocab_size=61, hidden_size=16)
    checkpoint = make_checkpoint(tmp_path, recipe)
    configs = [
        msgspec.structs.replace(
            checkpoint.engine_config(dtype, max_model_len=64),
            scheduler=SchedulerConfig(max_num_seqs=20, max_num_batched_tokens=48),
            exact=exact,
        )
        for dtype, exact in (("bfloat16", False), ("float32", True))
    ]
    for at_start, later, messages in serve(configs):
        assert later == []
        assert 15 <= at_start <= 60
        [said] = [message for message in messages if "kernels compiled or loaded in" in message]
        # The first was tried before, to see if it can be.
        assert at_start - 2 <= int(said.split()[0]) <= at_start


def test_a_warm_up_that_takes_long_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = itertools.count(0, 1.5)  # seconds from one look to the next
    monkeypatch.setattr(warm_up, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    runs = WarmUp(make_config(), 1).make_full_runs()[:5]
    with caplog.at_level(logging.INFO, warm_up.__name__):
        warm_up.run_all(runs, lambda _step: None, lambda: None)
    said = [record.getMessage() for record in caplog.records]
    assert said == ["warm-up: 2 of 5 steps, 4 s", "warm-up: 4 of 5 steps, 9 s"]


@pytest.mark.parametrize(
    ("max_num_seqs", "max_tokens", "max_len"),
    [(1, 1, 1), (1, 8, 4), (3, 2, 50), (256, 2048, 40_960), (64, 512, 100)],
)
def test_every_step_of_a_warm_up_is_one_that_the_engine_may_run(
    max_num_seqs: int, max_tokens: int, max_len: int
) -> None:
    scheduler = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_tokens)
    warm_up = WarmUp(make_config(max_model_len=max_len, scheduler=scheduler), 1)
    most = 0
    for run in [*warm_up.make_full_runs(), *warm_up.make_brief_runs()]:
        known: dict[int, int] = {}
        for step in run:
            for request in step.new_requests:
                known[request.row] = 0
            for row, count in zip(step.rows, step.num_tokens, strict=True):
                known[row] += count
                assert known[row] <= max_len
            assert sum(step.num_tokens) <= max_tokens
            assert len(step.rows) <= max_num_seqs
            most = max(most, sum(step.num_tokens))
    assert most >= 0.9 * min(max_tokens, max_num_seqs * max_len)  # it shows what a step takes
