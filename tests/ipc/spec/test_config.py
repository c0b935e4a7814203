"""EngineConfig's own checks; what reads config.json and the user's arguments is tested in frontend."""

from __future__ import annotations

import msgspec
import pytest
from fakes import make_config
from quire.ipc.errors import ConfigError, EngineStartError, ModelError, did_you_mean, raise_remote
from quire.ipc.spec.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        (CacheConfig, "block_size", 12),
        (CacheConfig, "num_gpu_blocks_override", 0),
        (CacheConfig, "kv_cache_memory_bytes", -1),
        (CacheConfig, "gpu_memory_utilization", 1.5),
        (SchedulerConfig, "max_num_batched_tokens", 0),
        (SchedulerConfig, "max_num_seqs", 0),
        (SchedulerConfig, "run_ahead", 3),
        (ParallelConfig, "device", "tpu"),
        (ParallelConfig, "executor_backend", "external"),
        (ParallelConfig, "tensor_parallel_size", 65),
        (ParallelConfig, "pipeline_parallel_size", 0),
        (ParallelConfig, "data_parallel_size", 65),
        (ParallelConfig, "num_threads", 0),
        (CacheConfig, "num_gpu_blocks_override", 2**31),
        (CacheConfig, "kv_cache_memory_bytes", 2**63),
        (SchedulerConfig, "max_num_batched_tokens", 2**31),
        (SchedulerConfig, "long_prefill_token_threshold", 2**31),
        (SchedulerConfig, "max_num_seqs", 10**400),
    ],
)
def test_a_bad_value_is_refused_by_name(part: type[msgspec.Struct], field: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        part(**{field: value})
    assert caught.value.field == field


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), 0, -1, 0.5, 86401, 10**400, "60", True])
def test_a_ready_timeout_is_a_wait_that_a_poll_can_make(seconds: object) -> None:
    with pytest.raises(ConfigError, match=r"^ready_timeout_s=.*: seconds from 1 to 86400$"):
        msgspec.structs.replace(make_config(), ready_timeout_s=seconds)


def test_without_chunked_prefill_a_step_must_hold_the_longest_prompt() -> None:
    scheduler = SchedulerConfig(enable_chunked_prefill=False, max_num_batched_tokens=64)
    with pytest.raises(ConfigError, match="max_model_len=128"):
        make_config(max_model_len=128, scheduler=scheduler)


def test_a_config_survives_the_launch_pipe() -> None:
    config = make_config(max_model_len=96)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig) == config
    assert config.max_blocks_per_request == 12
    assert config.block_size_bytes == 2 * 1 * 1 * 8 * 4 * 8


def test_a_remote_error_keeps_the_class_of_a_user_error_only() -> None:
    with pytest.raises(ModelError, match=r"^model='x': a folder$"):
        raise_remote("ModelError", "model='x': a folder")
    with pytest.raises(EngineStartError, match="boom"):
        raise_remote("SystemExit", "boom")


def test_a_close_name_is_suggested() -> None:
    assert did_you_mean("temprature", ["temperature", "top_p"]) == ", did you mean 'temperature'?"
    assert did_you_mean("zzz", ["temperature", "top_p"]) == ""
    for shortened, whole in (
        ("gpu_mem_utilization", "gpu_memory_utilization"),
        ("maxlogprobs", "max_logprobs"),
    ):
        assert did_you_mean(shortened, [whole]) == f", did you mean {whole!r}?"


def test_a_name_that_is_only_spelled_alike_is_not_suggested() -> None:
    for name, known in (
        ("--ssl-keyfile", "--api-key-file"),
        ("--kv-cache-dtype", "--kv-cache-memory-bytes"),
        ("--disable-log-requests", "--disable-log-stats"),
        ("enable_lora", "enable_tool"),
    ):
        assert did_you_mean(name, [known]) == ""
