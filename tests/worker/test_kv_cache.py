"""The memory plan: where the number of blocks comes from, and refusals that name the number to change."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from quire.ipc.errors import ConfigError
from quire.ipc.spec.config import CacheConfig, EngineConfig
from quire.ipc.spec.recurrent_spec import ShortConvSpec
from quire.kernels.attention.narrow_cache import view_parts
from quire.worker import kv_cache
from quire.worker.kv_cache import (
    allocate_kv_caches,
    allocate_states,
    copy_blocks,
    estimate_activation_bytes,
    plan_memory,
)
from row_driver import toy_config

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
GIB = 1 << 30


def _config(max_model_len: int = 64, **cache: Any) -> EngineConfig:
    """Blocks of 8 tokens take 64 bytes, a request of 64 tokens 8 blocks."""
    config = toy_config(max_model_len=max_model_len)
    return msgspec.structs.replace(config, cache=CacheConfig(block_size=8, **cache))


def _wide_config(**cache: Any) -> EngineConfig:
    """Blocks of 8 MiB, so that gigabytes matter; a request takes 8 of them."""
    config = _config(**cache)
    [layer] = config.model.spec.layers
    attention = msgspec.structs.replace(layer.attention, num_kv_heads=32, head_size=32)
    layers = (msgspec.structs.replace(layer, attention=attention),) * 128
    spec = msgspec.structs.replace(config.model.spec, layers=layers)
    model = msgspec.structs.replace(config.model, spec=spec)
    return msgspec.structs.replace(config, model=model)


@pytest.fixture
def free_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A machine with as much free memory as the test says."""
    free = [8 * GIB]
    monkeypatch.setattr(kv_cache, "_free_bytes", lambda _device: free[0])
    return free


@pytest.mark.usefixtures("free_bytes")
def test_the_override_wins_over_the_size_and_the_size_over_the_machine() -> None:
    assert (
        plan_memory(_config(num_gpu_blocks_override=11, kv_cache_memory_bytes=64_000), CPU, 0).num_blocks
        == 11
    )
    assert plan_memory(_config(kv_cache_memory_bytes=1000), CPU, 0).num_blocks == 1000 // 64


def test_without_a_size_a_cpu_holds_what_all_requests_need_within_bounds(free_bytes: list[int]) -> None:
    config = _wide_config()
    assert config.block_size_bytes == 8 << 20
    free_bytes[0] = 64 * GIB
    assert plan_memory(_config(), CPU, 0).num_blocks == 8 * 8
    assert plan_memory(config, CPU, 0).num_blocks == 64
    many = msgspec.structs.replace(
        config, scheduler=msgspec.structs.replace(config.scheduler, max_num_seqs=1000)
    )
    assert plan_memory(many, CPU, 0).num_blocks == 4 * GIB // (8 << 20)
    free_bytes[0] = 2 * GIB + estimate_activation_bytes(many)
    assert plan_memory(many, CPU, 0).num_blocks == GIB // (8 << 20)


def test_ranks_share_the_memory_of_a_machine(free_bytes: list[int]) -> None:
    config, free_bytes[0] = _wide_config(), GIB
    activations = estimate_activation_bytes(config)
    for num_ranks in (1, 2, 4):
        free = free_bytes[0] // num_ranks - activations
        expected = free // 2 // config.block_size_bytes
        assert plan_memory(config, CPU, 0, num_ranks).num_blocks == expected


def test_the_ledger_adds_up_to_what_was_planned(free_bytes: list[int]) -> None:
    plan = plan_memory(_config(), CPU, 12_345)
    sizes = dict(plan.ledger)
    assert sizes["weights"] == 12_345
    assert sizes["KV cache"] == plan.num_blocks * 64
    assert sizes["activations"] > 0
    assert sum(sizes.values()) <= free_bytes[0]


@pytest.mark.parametrize(
    ("cache", "field", "least"),
    [
        ({"num_gpu_blocks_override": 7}, "num_gpu_blocks_override", 8),
        ({"kv_cache_memory_bytes": 511}, "kv_cache_memory_bytes", 512),
    ],
)
@pytest.mark.usefixtures("free_bytes")
def test_a_cache_too_small_for_one_request_is_refused_with_the_number(
    cache: dict[str, int], field: str, least: int
) -> None:
    with pytest.raises(ConfigError, match=f"at least {least} .*max_model_len at most 56") as refusal:
        plan_memory(_config(**cache), CPU, 0)
    assert (refusal.value.field, refusal.value.value) == (field, cache[field])
    plan_memory(_config(**{field: least}), CPU, 0)
    plan_memory(_config(max_model_len=56, **cache), CPU, 0)


def test_a_machine_too_small_for_one_request_is_refused(free_bytes: list[int]) -> None:
    config = _wide_config()
    free_bytes[0] = estimate_activation_bytes(config) + 2 * 3 * config.block_size_bytes
    with pytest.raises(
        ConfigError, match=f"at least {8 * config.block_size_bytes} .*max_model_len at most 24"
    ):
        plan_memory(config, CPU, 0)
    free_bytes[0] = 0
    with pytest.raises(ConfigError, match=r"0 fit\)$"):
        plan_memory(config, CPU, 0)


@pytest.mark.parametrize("cache", [{"num_gpu_blocks_override": 4000}, {"kv_cache_memory_bytes": 32 * GIB}])
@pytest.mark.usefixtures("free_bytes")
def test_more_than_the_machine_has_is_refused(cache: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="at most") as refusal:
        plan_memory(_wide_config(**cache), CPU, 0)
    assert refusal.value.field in cache


@pytest.fixture
def own_bytes(free_bytes: list[int], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A GPU of 10 GiB, of which this process holds as much as the test says."""
    own = [0]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (free_bytes[0], 10 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: own[0])
    return own


def _count_fitting(config: EngineConfig, size: int) -> int:
    kept = estimate_activation_bytes(config) + kv_cache._CUDA_RESERVE_BYTES
    return (size - kept) // config.block_size_bytes


def test_a_gpu_gives_an_engine_its_fraction_whatever_others_hold(
    free_bytes: list[int], own_bytes: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    config = _wide_config(gpu_memory_utilization=0.45)
    own_bytes[0] = GIB
    free_bytes[0] = 9 * GIB  # it is alone
    alone = plan_memory(config, CUDA, 0).num_blocks
    assert alone == _count_fitting(config, int(4.5 * GIB) - GIB)
    free_bytes[0] = int(4.5 * GIB)  # beside another that has 0.45
    assert plan_memory(config, CUDA, 0).num_blocks == alone
    assert not caplog.records
    free_bytes[0] = 3 * GIB  # beside one that has more
    assert plan_memory(config, CUDA, 0).num_blocks == _count_fitting(config, 3 * GIB)
    assert [record.getMessage() for record in caplog.records] == [
        "gpu_memory_utilization=0.45: of this engine's share, 4608 MiB of cuda, other processes hold 512 MiB"
    ]
    own_bytes[0] = 4 * GIB
    with pytest.raises(ConfigError, match="or kv_cache_memory_bytes at least") as refusal:
        plan_memory(config, CUDA, 0)
    assert refusal.value.field == "gpu_memory_utilization"


@pytest.mark.usefixtures("own_bytes")
def test_a_replaced_worker_has_as_many_blocks_as_the_lost_one(free_bytes: list[int]) -> None:
    config = _wide_config(gpu_memory_utilization=0.9)
    before = plan_memory(config, CUDA, 0).num_blocks
    again = config.for_next_worker(before)
    free_bytes[0] -= 200 << 20  # somebody's window has become larger
    assert plan_memory(config, CUDA, 0).num_blocks < before
    assert plan_memory(again, CUDA, 0).num_blocks == before
    free_bytes[0] += GIB
    assert plan_memory(again, CUDA, 0).num_blocks == before
    free_bytes[0] = 3 * GIB  # far too little: what fits, and the core starts anew
    assert plan_memory(again, CUDA, 0).num_blocks == _count_fitting(config, 3 * GIB)
    assert plan_memory(config.for_next_worker(20), CPU, 0).num_blocks == 20


@pytest.mark.usefixtures("own_bytes")
def test_a_replaced_worker_waits_for_the_lost_ones_memory(
    free_bytes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _wide_config(gpu_memory_utilization=0.9).for_next_worker(700)
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] >= 1.0:
            free_bytes[0] = 9 * GIB

    clock = type("Clock", (), {"monotonic": lambda: now[0], "sleep": sleep})
    monkeypatch.setattr(kv_cache, "time", clock)
    free_bytes[0] = GIB
    kv_cache.wait_for_memory(config, CUDA)
    assert 1.0 <= now[0] < 1.1
    assert plan_memory(config, CUDA, 0).num_blocks == 700
    kv_cache.wait_for_memory(config, CUDA)
    assert now[0] < 1.1  # it is there
    kv_cache.wait_for_memory(config.for_next_worker(10**6), CUDA)
    assert now[0] < 30  # and it does not wait for ever
    kv_cache.wait_for_memory(config.for_next_worker(10**6), CPU)


def test_tensors_have_the_layout_that_attention_expects() -> None:
    caches = allocate_kv_caches(_config(), 5, CPU)
    assert len(caches) == 1
    assert all(tensor.shape == (5, 1, 8, 1) and tensor.dtype == torch.float32 for tensor in caches[0])
    assert all(tensor.is_contiguous() for tensor in caches[0])


@pytest.mark.parametrize(("name", "dtype"), [("int8", torch.int8), ("fp8_e4m3", torch.uint8)])
def test_a_cache_of_8_bits_takes_the_bytes_that_are_planned_with(name: Any, dtype: torch.dtype) -> None:
    config = msgspec.structs.replace(_config(), cache=CacheConfig(block_size=8, kv_cache_dtype=name))
    [caches] = allocate_kv_caches(config, 5, CPU)
    assert all(tensor.shape == (5, 1, 8, 1 + 4) and tensor.dtype == dtype for tensor in caches)
    assert sum(tensor.nbytes for tensor in caches) == 5 * config.block_size_bytes
    for tensor in caches:
        view_parts(tensor)[1].copy_(torch.arange(40.0).view(5, 1, 8))
    copy_blocks([caches], config.model.spec.layers, (1,), [(0, 1, 4), (0, 0, 2)])
    assert all(view_parts(tensor)[1][4, 0].tolist() == list(range(8, 16)) for tensor in caches)


@pytest.mark.usefixtures("free_bytes")
def test_an_encoder_keeps_no_kv_and_its_layers_share_the_blocks_of_two() -> None:
    config = _wide_config()
    spec = config.model.spec
    attention = msgspec.structs.replace(spec.layers[0].attention, num_kv_heads=1, is_causal=False)
    layer = msgspec.structs.replace(spec.layers[0], attention=attention)
    encoder = msgspec.structs.replace(spec, layers=(layer,) * 5)
    config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, spec=encoder))
    plan = plan_memory(config, CPU, 0)
    assert plan.num_blocks == 0
    assert [size for name, size in plan.ledger if name == "KV cache"] == [0]
    caches = allocate_kv_caches(config, plan.num_blocks, CPU)
    starts = [k_cache.data_ptr() for k_cache, _ in caches]
    assert starts == [starts[0], starts[1]] * 2 + [starts[0]]
    most_tokens = config.scheduler.max_num_batched_tokens
    assert (caches[0][0].shape[0] - config.scheduler.max_num_seqs) * 8 >= most_tokens


def _hybrid_config(max_num_seqs: int = 8, **cache: Any) -> EngineConfig:
    """Blocks of 8 MiB, a request takes 8 of them and a state slot of 16 MiB."""
    config = _wide_config()
    layer = msgspec.structs.replace(
        config.model.spec.layers[0], recurrent=ShortConvSpec(num_channels=1 << 15, kernel_size=2)
    )
    spec = msgspec.structs.replace(config.model.spec, layers=(layer,) * 128)
    scheduler = msgspec.structs.replace(config.scheduler, max_num_seqs=max_num_seqs)
    model = msgspec.structs.replace(config.model, spec=spec)
    cache_config = CacheConfig(block_size=8, **cache)
    return msgspec.structs.replace(config, model=model, scheduler=scheduler, cache=cache_config)


def test_states_of_rows_come_first_and_of_prefixes_have_a_quarter_of_the_bytes_of_kv(
    free_bytes: list[int],
) -> None:
    config = _hybrid_config()
    assert (config.block_size_bytes, config.state_bytes) == (8 << 20, 16 << 20)
    plan = plan_memory(config, CPU, 0)
    assert plan.num_blocks == 64
    assert plan.num_state_slots == 8 + 64 * 8 // 4 // 16
    assert dict(plan.ledger)["states"] == plan.num_state_slots * config.state_bytes
    assert plan_memory(_hybrid_config(num_state_slots=9), CPU, 0).num_state_slots == 9
    alone = plan_memory(_hybrid_config(enable_prefix_caching=False), CPU, 0)
    assert alone.num_state_slots == 8
    again = config.for_next_worker(plan.num_blocks, plan.num_state_slots)
    assert plan_memory(again, CPU, 0).num_state_slots == plan.num_state_slots
    # With little memory there are the rows' and what KV leaves.
    free_bytes[0] = estimate_activation_bytes(config) + (8 * 16 + 16 * 8 << 20)
    assert plan_memory(config, CPU, 0).num_state_slots == 8 + 8 * 8 // 4 // 16
    assert "states" not in dict(plan_memory(_wide_config(), CPU, 0).ledger)


def test_a_gpus_share_is_divided_between_kv_and_states(free_bytes: list[int], own_bytes: list[int]) -> None:
    config = _hybrid_config()
    plan, left = plan_memory(config, CUDA, 0), int(0.9 * 10 * GIB) - estimate_activation_bytes(config)
    free_bytes[0], own_bytes[0] = 10 * GIB, 0
    plan = plan_memory(config, CUDA, 0)
    left -= kv_cache._CUDA_RESERVE_BYTES
    taken = plan.num_blocks * config.block_size_bytes + plan.num_state_slots * config.state_bytes
    assert left - (24 << 20) <= taken <= left


@pytest.mark.parametrize(
    ("cache", "field"), [({}, "max_num_seqs"), ({"num_state_slots": 100}, "num_state_slots")]
)
def test_more_states_than_fit_are_refused_with_the_most_that_do(
    free_bytes: list[int], cache: dict[str, int], field: str
) -> None:
    config = _hybrid_config(max_num_seqs=100, **cache)
    room = 70 * 16 << 20
    free_bytes[0] = estimate_activation_bytes(config) + (64 << 20) + room
    text = f"at most 70: each has a state of {16 << 20} bytes, {room} are free for them"
    with pytest.raises(ConfigError, match=text) as refusal:
        plan_memory(config, CPU, 0)
    assert (refusal.value.field, refusal.value.value) == (field, 100)


def test_fewer_slots_than_rows_are_refused_and_slots_of_a_model_without_states() -> None:
    with pytest.raises(ConfigError, match=r"at least max_num_seqs=8, .* max_num_seqs at most 7"):
        _hybrid_config(num_state_slots=7)
    with pytest.raises(
        ConfigError, match="num_state_slots=7: expected None for a model without recurrent layers"
    ):
        _config(num_state_slots=7)


def test_slots_are_aligned_and_of_a_part_without_states_there_are_none() -> None:
    states = allocate_states(_hybrid_config(), 3, CPU)
    assert states is not None
    assert states.shape == (3, 4 << 20)
    assert states.dtype == torch.float32
    assert states.data_ptr() % 64 == 0
    assert allocate_states(_config(), 0, CPU) is None
