"""Worker from start to steps, on real checkpoints: ledger, threads, and transformers' own tokens."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from checkpoints import Checkpoint, Recipe, make_checkpoint
from quire.ipc.errors import ConfigError
from quire.ipc.params.sampling_params import SamplingParams
from quire.ipc.protocol.step import GroupBlocks, NewRequestData, SchedulerOutput
from quire.ipc.protocol.token_ids import encode_token_ids
from quire.ipc.protocol.token_lists import TokenLists
from quire.ipc.spec.config import CacheConfig, EngineConfig, ParallelConfig
from quire.worker.devices import resolve_device
from quire.worker.threads import ThreadRule, count_cores
from quire.worker.worker import Worker

pytestmark = pytest.mark.usefixtures("restored_torch")
PROMPT_LENGTHS = {0: 37, 3: 5, 6: 18}
NUM_OUTPUTS = 12


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), Recipe(family="llama"))


def _prompt(row: int) -> list[int]:
    return np.random.default_rng(row).integers(0, 131, PROMPT_LENGTHS[row]).tolist()


def _config(checkpoint: Checkpoint, **parallel: Any) -> EngineConfig:
    config = checkpoint.engine_config(max_model_len=64)
    return msgspec.structs.replace(
        config, cache=CacheConfig(block_size=8), parallel=ParallelConfig(**parallel)
    )


def _enter(row: int, params: SamplingParams) -> NewRequestData:
    blocks = list(range(row * 8, row * 8 + 8))[::-1]
    return NewRequestData(
        row, str(row), encode_token_ids(_prompt(row)), b"", params, [], TokenLists(), [GroupBlocks(blocks)], 0
    )


def _generate(worker: Worker, chunk: int, params: SamplingParams) -> dict[int, list[int]]:
    known, computed = dict(PROMPT_LENGTHS), dict.fromkeys(PROMPT_LENGTHS, 0)
    tokens: dict[int, list[int]] = {row: [] for row in PROMPT_LENGTHS}
    entering = [_enter(row, params) for row in PROMPT_LENGTHS]
    while min(map(len, tokens.values())) < NUM_OUTPUTS:
        rows = list(PROMPT_LENGTHS)
        counts = [min(chunk, known[row] - computed[row]) for row in rows]
        for row, count in zip(rows, counts, strict=True):
            computed[row] += count
        sampled_rows = [row for row in rows if computed[row] == known[row]]
        output = worker.execute(SchedulerOutput(0, rows, counts, entering, sampled_rows=sampled_rows))
        entering = []
        for row, token in zip(output.rows, output.token_ids, strict=True):
            known[row] += 1
            tokens[row].append(token)
    return {row: values[:NUM_OUTPUTS] for row, values in tokens.items()}


@pytest.fixture(scope="module")
def golden(llama: Checkpoint) -> dict[int, list[int]]:
    """What transformers generates greedily, one request at a time."""
    with torch.no_grad():
        return {
            row: llama.reference.generate(
                torch.tensor([_prompt(row)]), max_new_tokens=NUM_OUTPUTS, do_sample=False, eos_token_id=None
            )[0, length:].tolist()
            for row, length in PROMPT_LENGTHS.items()
        }


def test_a_length_that_no_memory_holds_is_refused_before_anything_is_as_long(llama: Checkpoint) -> None:
    config = llama.engine_config(max_model_len=2**31 - 1)  # as a config.json may say
    with pytest.raises(ConfigError, match=r"max_model_len=2147483647: expected at most \d+ .one request"):
        Worker(config, lambda _phase: None).start()


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_greedy_tokens_equal_transformers(
    llama: Checkpoint, chunk: int, golden: dict[int, list[int]]
) -> None:
    worker = Worker(_config(llama), lambda _phase: None)
    worker.start()
    assert _generate(worker, chunk, SamplingParams(temperature=0.0)) == golden
    worker.reset_rows()
    assert _generate(worker, chunk, SamplingParams(temperature=0.0)) == golden


def test_start_announces_its_phases_and_reports_a_ledger(llama: Checkpoint) -> None:
    announced: list[str] = []
    worker = Worker(_config(llama), announced.append)
    ready = worker.start()
    assert announced == ["set up device", "load weights", "allocate KV cache", "warm up"]
    assert [name for name, _ in ready.ledger] == ["weights", "activations", "KV cache", "reserve"]
    assert ready.ledger[0][1] > 0
    assert ready.num_gpu_blocks == 256 * 8
    assert ready.device == "cpu"
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(ready), type=type(ready)) == ready


def test_the_smallest_possible_engine_starts(llama: Checkpoint) -> None:
    config = llama.engine_config(max_model_len=1)
    config = msgspec.structs.replace(config, cache=CacheConfig(num_gpu_blocks_override=1))
    assert Worker(config, lambda _: None).start().num_gpu_blocks == 1


def test_a_cache_too_small_fails_the_start(llama: Checkpoint) -> None:
    config = msgspec.structs.replace(_config(llama), cache=CacheConfig(num_gpu_blocks_override=1))
    with pytest.raises(ConfigError, match="num_gpu_blocks_override=1: expected at least 4"):
        Worker(config, lambda _: None).start()


def test_too_little_memory_in_a_lost_workers_place_is_not_the_users_error(llama: Checkpoint) -> None:
    config = msgspec.structs.replace(_config(llama), cache=CacheConfig(kv_cache_memory_bytes=1 << 60))
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes"):
        Worker(config, lambda _: None).start()
    with pytest.raises(MemoryError, match="kv_cache_memory_bytes"):
        Worker(config.for_next_worker(1 << 50), lambda _: None).start()


def test_threads_follow_the_config_then_the_size_of_the_step(llama: Checkpoint) -> None:
    assert ThreadRule(3, 1, 4).choose(1) == 3
    small = ThreadRule(None, 4 << 20, 1 << 20)
    assert small.choose(1) == 1
    assert small.choose(1000) == count_cores()
    assert ThreadRule(None, 1 << 30, 1 << 29).choose(1) == count_cores()
    Worker(_config(llama), lambda _: None).start()
    assert torch.get_num_threads() == 1
    Worker(_config(llama, num_threads=2), lambda _: None).start()
    assert torch.get_num_threads() == 2


def test_a_missing_gpu_is_named() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match="device='cuda': expected cpu or auto"):
        resolve_device("cuda")


def test_sampled_logprobs_of_a_real_model_are_transformers(llama: Checkpoint) -> None:
    worker = Worker(_config(llama), lambda _: None)
    worker.start()
    params = SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=0)
    output = worker.execute(SchedulerOutput(0, [3], [PROMPT_LENGTHS[3]], [_enter(3, params)]))
    with torch.no_grad():
        exact = torch.log_softmax(llama.reference(torch.tensor([_prompt(3)])).logits[0].double(), 1)
    sample, prompt = output.logprobs[0].sample, output.logprobs[0].prompt
    assert sample is not None
    assert prompt is not None
    # Two float32 implementations of a two-layer model differ by rounding alone: 1e-4 of logits up to 20.
    np.testing.assert_allclose(
        np.frombuffer(sample.logprobs, np.float32)[1:], exact[-1].topk(3).values, rtol=0, atol=1e-4
    )
    expected = exact[:-1].gather(1, torch.tensor(_prompt(3)[1:])[:, None])[:, 0]
    np.testing.assert_allclose(np.frombuffer(prompt.logprobs, np.float32), expected, rtol=0, atol=1e-4)
