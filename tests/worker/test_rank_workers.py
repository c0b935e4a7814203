"""Workers that share a model and have a device each (gloo.py), as threads: their steps; one that fails."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from checkpoints import RECIPES, make_checkpoint
from gloo import join_group
from msgspec.structs import replace
from quire.ipc.params.sampling_params import SamplingParams
from quire.ipc.protocol.step import GroupBlocks, NewRequestData, SchedulerOutput
from quire.ipc.protocol.token_ids import encode_token_ids
from quire.ipc.protocol.token_lists import TokenLists
from quire.ipc.spec.config import EngineConfig
from quire.kernels.group.shared_group import GroupAborted
from quire.worker import worker as worker_module
from quire.worker.worker import Worker
from ranks import with_ranks

PROMPT = [3, 1, 4, 1, 5, 9]
NUM_STEPS = 6

pytestmark = pytest.mark.usefixtures("library", "restored_torch")


def generate(worker: Worker, temperature: float) -> list[int]:
    """The tokens of a request, in steps as a core would send them."""
    request = NewRequestData(
        row=0,
        request_id="a",
        prompt_token_ids=encode_token_ids(PROMPT),
        output_token_ids=b"",
        sampling_params=SamplingParams(temperature=temperature, seed=5, prompt_logprobs=2),
        eos_token_ids=[],
        token_lists=TokenLists(),
        blocks=[GroupBlocks([0])],
        num_computed_tokens=0,
    )
    steps = [SchedulerOutput(0, [0], [len(PROMPT)], [request])]
    steps += [SchedulerOutput(index, [0], [1]) for index in range(1, NUM_STEPS)]
    tokens = [token for step in steps for token in worker.execute(step).token_ids]
    worker.reset_rows()
    return tokens


def ignore(phase: str) -> None:
    """Of a start."""


def configure(folder: Path) -> EngineConfig:
    config = make_checkpoint(folder, RECIPES["gemma2"]).engine_config()
    return replace(config, parallel=replace(config.parallel, num_threads=1))


def test_ranks_give_the_tokens_of_one_and_go_on_after_one_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(tmp_path)
    alone = Worker(config, ignore)
    alone.start()
    expected = [generate(alone, temperature) for temperature in (0.0, 1.0)]

    def act(rank: int, path: str) -> list[list[int]]:
        worker = Worker(with_ranks(config, 2), ignore, rank, path)
        worker.start()
        results = [generate(worker, 0.0)]
        if rank == 1:
            worker.abort_group(RuntimeError("it has burst"))
        with pytest.raises(GroupAborted, match="rank 1: RuntimeError: it has burst"):
            generate(worker, 0.0)
        worker.reset_rows()
        return [*results, generate(worker, 1.0)]

    monkeypatch.setattr(worker_module, "join_group", join_group)
    fd = os.memfd_create("group")
    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(act, rank, f"/proc/self/fd/{fd}") for rank in range(2)]
        assert [future.result(60) for future in futures] == [expected] * 2
    os.close(fd)
