"""EngineConfig's own checks; what reads config.json and the user's arguments is tested in frontend."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from fakes import make_config
from quire.ipc.errors import ConfigError, EngineStartError, ModelError, did_you_mean, raise_remote
from quire.ipc.spec.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    RecoveryConfig,
    SchedulerConfig,
)
from quire.ipc.spec.model_spec import AttentionSpec, LatentSpec
from quire.ipc.spec.options import Option, read_options

PARTS = (ModelConfig, ParallelConfig, CacheConfig, SchedulerConfig, RecoveryConfig, EngineConfig)
OPTIONS = [option for part in PARTS for option in read_options(part) if option.type is not str]


def list_refused(option: Option) -> Iterator[object]:
    """What a declared number or switch may not be: of another type, or beyond its range."""
    yield from ("7", [1], {}, *(() if option.is_optional else (None,)))
    if option.type is bool:
        yield from (1, 0.0)
        return
    yield from (True, float("nan"), float("inf"), 10**400, -3)
    if option.choices:
        yield from (each + 1 for each in option.choices)
        return
    low = option.get("low", option.meta.gt if option.meta.ge is None else option.meta.ge)
    yield option.meta.le * 2 + 1
    yield from [low / 2] if option.type is float and low > 0 else []
    yield from [low - 1, low + 0.5] if option.type is int else []


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_what_an_option_does_not_allow_is_refused_by_its_name_with_its_range(option: Option) -> None:
    option.check(option.default)
    for value in list_refused(option):
        with pytest.raises(ConfigError, match=f"^{option.name}=") as caught:
            option.check(value)
        assert str(caught.value).endswith(f": expected {option.describe_allowed(value)}")


@pytest.mark.parametrize("part", PARTS[1:5])
def test_a_part_of_a_config_checks_what_it_declares(part: type[msgspec.Struct]) -> None:
    for option in read_options(part):
        with pytest.raises(ConfigError, match=f"^{option.name}="):
            part(**{option.field: "tpu" if option.type is str else "7"})


@pytest.mark.parametrize(
    ("part", "name", "value", "allowed"),
    [
        (EngineConfig, "ready_timeout_s", 0.5, "seconds from 1 to 86400"),
        (EngineConfig, "step_timeout_s", -1.0, "seconds from 0.1 to 86400, or 0 for none"),
        (EngineConfig, "exact", "always", "True, False or None"),
        (CacheConfig, "gpu_memory_utilization", 1.5, "a number above 0 and up to 1"),
        (CacheConfig, "kv_cache_memory_bytes", 0, f"an integer from 1 to {2**63 - 1}"),
        (CacheConfig, "block_size", 13, "one of 8, 16, 32, 64, 128"),
        (SchedulerConfig, "run_ahead", 3, "an integer from 1 to 2"),
        (SchedulerConfig, "scheduling_policy", "random", "one of fcfs, priority, fair"),
        (ModelConfig, "enforce_eager", 1, "True or False"),
        (ModelConfig, "max_logprobs", -2, "an integer from -1 to 2147483647"),
    ],
)
def test_what_is_allowed_is_said_as_users_write_it(
    part: type[msgspec.Struct], name: str, value: object, allowed: str
) -> None:
    option = next(option for option in read_options(part) if option.name == name)
    with pytest.raises(ConfigError) as caught:
        option.check(value)
    assert str(caught.value) == f"{name}={value!r}: expected {allowed}"


def test_without_chunked_prefill_a_step_must_hold_the_longest_prompt() -> None:
    scheduler = SchedulerConfig(enable_chunked_prefill=False, max_num_batched_tokens=64)
    with pytest.raises(ConfigError, match="max_model_len=128"):
        make_config(max_model_len=128, scheduler=scheduler)


def test_a_config_survives_the_launch_pipe() -> None:
    config = make_config(max_model_len=96)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig) == config
    assert config.max_blocks_per_request == 12
    assert config.block_size_bytes == 2 * 1 * 1 * 8 * 4 * 8


def test_a_cache_of_8_bits_has_scales_and_is_for_models_that_keep_kv() -> None:
    cache = CacheConfig(block_size=8, kv_cache_dtype="fp8_e4m3")
    assert cache == CacheConfig(block_size=8, kv_cache_dtype="fp8")
    config = msgspec.structs.replace(make_config(), cache=cache)
    assert config.block_size_bytes == 2 * 1 * 1 * (8 + 4) * 8
    assert config.kv_dtype == "fp8"
    assert make_config().kv_dtype == "float32"
    replace, spec = msgspec.structs.replace, config.model.spec
    layer = spec.layers[0]
    layer = replace(layer, attention=replace(layer.attention, is_causal=False))
    encoder = replace(config.model, spec=replace(spec, layers=(layer,)))
    with pytest.raises(ConfigError, match="kv_cache_dtype='fp8': expected auto for an encoder"):
        replace(config, model=encoder)
    latent = LatentSpec(rank=16, nope_size=8, rope_size=4, value_size=8)
    layer = replace(layer, attention=AttentionSpec(num_heads=2, num_kv_heads=1, head_size=20, latent=latent))
    model = replace(config.model, spec=replace(spec, layers=(layer,)))
    narrow = replace(config, model=model)
    assert narrow.block_size_bytes == (16 + 2 * 4 + 4) * 8, "two codes of each rotated number, and a scale"
    assert narrow.model.spec.layers[0].attention.head_size == 24
    assert replace(narrow, cache=CacheConfig(block_size=8)).model == model
    plain = replace(config, model=model, cache=CacheConfig(block_size=8))
    assert plain.block_size_bytes == 20 * 4 * 8, "keys and values are one latent"


def test_a_model_that_chooses_keys_is_refused_beyond_what_it_chooses() -> None:
    config, replace = make_config(), msgspec.structs.replace
    most = config.model.max_model_len
    replace(config, model=replace(config.model, spec=replace(config.model.spec, most_keys=most)))
    spec = replace(config.model.spec, most_keys=most - 1)
    with pytest.raises(ConfigError, match=f"max_model_len={most}: expected at most {most - 1}: among more"):
        replace(config, model=replace(config.model, spec=spec))


def test_a_remote_error_keeps_the_class_of_a_user_error_only() -> None:
    with pytest.raises(ModelError, match=r"^model='x': expected a folder$"):
        raise_remote("ModelError", "model='x': expected a folder")
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
