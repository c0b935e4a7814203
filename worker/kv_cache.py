"""The KV cache's memory: a plan with a ledger, the number of blocks, and the tensors. All sizes are in bytes.

An encoder keeps no KV. Its layers use two layers' blocks in turn, in which a step's prompts lie one after the
other: a layer's keys may be written while the last layer's are still read.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import psutil
import torch
from torch import Tensor

from ..ipc.errors import ConfigError
from ..ipc.processes.cgroup import find_free_memory
from ..ipc.processes.process_limits import describe_address_space, find_free_address_space
from ..ipc.spec.config import EngineConfig
from ..ipc.spec.kv_groups import find_places
from ..ipc.spec.linear_shapes import count_model_bytes
from ..ipc.spec.model_spec import DTYPE_SIZE_BYTES, LayerSpec, ModelSpec
from ..ipc.spec.weight_format import WeightFormats
from ..kernels.attention.narrow_cache import KV_DTYPES, SCALE_SIZE
from ..kernels.choice import choose_linear
from ..kernels.program.huge_pages import allocate_huge
from .attention.metadata import KVCache, KVCaches
from .steps.block_tables import TableGroup

_log = logging.getLogger(__name__)

_MIB = 1 << 20

# By default a CPU's cache is for max_num_seqs full requests, within these bounds: bytes, and the part of the
# available memory. The system gives a page when it is first written, so unused blocks cost nothing.
_MAX_AUTO_CPU_BYTES = 4 << 30
_MAX_AUTO_CPU_FRACTION = 0.5
_CUDA_RESERVE_BYTES = 512 * _MIB  # for the context's growth, library workspaces and fragmentation
_SCRATCH_BYTES = 64 * _MIB  # for slices of prompt logits and the sampler's temporaries, both bounded
# A worker that replaces a lost one takes as many blocks, even if this much less memory is free.
_NOISE_BYTES = _CUDA_RESERVE_BYTES // 2
_MAX_WAIT_S = 20.0  # for a lost worker's memory
_WAIT_INTERVAL_S = 0.05
_NUM_SCRATCH_LAYERS = 2  # whose blocks an encoder's layers share
_SNAPSHOT_FRACTION = 0.25  # bytes for states beside those of rows, of the bytes for KV


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How many blocks and state slots the device holds, and where its memory goes."""

    num_blocks: int
    ledger: list[tuple[str, int]]  # (name, bytes)
    num_state_slots: int = 0


def check_max_model_len(config: EngineConfig, device: torch.device) -> None:
    """Raise ConfigError for a max_model_len that can never fit, before tables of its positions are made.

    The number may come from config.json alone.
    """
    if not config.block_size_bytes:
        return
    needed, free = config.max_blocks_per_request * config.block_size_bytes, _free_bytes(device)
    if needed > free:
        most = config.find_longest(free // config.block_size_bytes)
        text = f"at most {most} (one request of that many tokens takes {needed} bytes, {free} are free)"
        raise ConfigError("max_model_len", config.model.max_model_len, text)


def check_weights_fit(config: EngineConfig, device: torch.device, num_ranks: int = 1) -> None:
    """Raise ConfigError for weights that can never fit, before any is read. `config` is a rank's."""
    model = config.model
    packs_table = choose_linear(getattr(torch, model.dtype), device, None, config.wants_exact) == "native"
    needed = count_model_bytes(model, num_ranks, packs_table)
    free = _free_share(device, num_ranks)
    if needed <= free:
        if config.state_bytes:
            _check_states(config, free - needed)
        return
    text = f"one whose weights fit: they take {needed} bytes, {free} are free"
    if model.quantization is None and model.spec.weight_formats == WeightFormats():
        int4 = count_model_bytes(msgspec.structs.replace(model, quantization="int4"), num_ranks, packs_table)
        text += f"; with quantization='int4' {int4}"
    raise ConfigError("model", model.model, text)


def wait_for_memory(config: EngineConfig, device: torch.device, num_ranks: int = 1) -> None:
    """Wait a while for the memory of the lost worker that this one replaces. `config` is a rank's.

    A GPU gives a killed process' memory back some time after its end.
    """
    assert config.num_blocks_before is not None
    if device.type != "cuda":
        return
    model = config.model
    needed = count_model_bytes(model, num_ranks)
    needed += estimate_activation_bytes(config) + _CUDA_RESERVE_BYTES - _NOISE_BYTES
    needed += config.num_blocks_before * config.block_size_bytes
    needed += _count_least_slots(config) * config.state_bytes
    ends_at = time.monotonic() + _MAX_WAIT_S
    while _free_bytes(device) < needed and time.monotonic() < ends_at:
        time.sleep(_WAIT_INTERVAL_S)


def plan_memory(
    config: EngineConfig, device: torch.device, weight_bytes: int, num_ranks: int = 1
) -> MemoryPlan:
    """Divide the device's memory after the weights were loaded; `num_ranks` share a CPU's.

    Raises ConfigError, with the number to change, if not even one request of max_model_len fits, or more was
    asked for than there is.
    """
    activation_bytes = estimate_activation_bytes(config)
    reserve_bytes = _CUDA_RESERVE_BYTES if device.type == "cuda" else 0
    free_bytes = _free_share(device, num_ranks) - activation_bytes - reserve_bytes
    states_bytes = _count_least_slots(config) * config.state_bytes
    if states_bytes:
        _check_states(config, free_bytes)
    num_blocks = _count_blocks(config, device, free_bytes, states_bytes)
    kv_bytes = num_blocks * config.block_size_bytes
    num_slots = _count_state_slots(config, num_blocks, free_bytes - kv_bytes) if states_bytes else 0
    ledger = [
        ("weights", weight_bytes),
        ("activations", activation_bytes),
        ("KV cache", kv_bytes),
        ("reserve", reserve_bytes),
    ]
    if num_slots:
        ledger.insert(3, ("states", num_slots * config.state_bytes))
    return MemoryPlan(num_blocks, ledger, num_slots)


def _count_least_slots(config: EngineConfig) -> int:
    """State slots that there must be: as many as asked for, or those of rows."""
    return config.cache.num_state_slots or config.scheduler.max_num_seqs


def _check_states(config: EngineConfig, free_bytes: int) -> None:
    """Raise ConfigError for slots that do not fit beside one request of max_model_len tokens."""
    num_slots, size = _count_least_slots(config), config.state_bytes
    room = max(0, free_bytes - config.max_blocks_per_request * config.block_size_bytes)
    if num_slots * size > room:
        field = "num_state_slots" if config.cache.num_state_slots else "max_num_seqs"
        text = f"at most {room // size}: each has a state of {size} bytes, {room} are free for them"
        raise ConfigError(field, num_slots, text + describe_address_space())


def _count_state_slots(config: EngineConfig, num_blocks: int, free_bytes: int) -> int:
    """As many as asked for, or those of rows and so many more: a quarter of the bytes of KV, one a block."""
    if config.cache.num_state_slots is not None:
        return config.cache.num_state_slots
    num_rows, size = config.scheduler.max_num_seqs, config.state_bytes
    if not config.cache.enable_prefix_caching:
        return num_rows
    kv_bytes = num_blocks * config.block_size_bytes or min(_MAX_AUTO_CPU_BYTES, free_bytes // 2)
    num_more = min(int(kv_bytes * _SNAPSHOT_FRACTION), free_bytes - num_rows * size) // size
    return num_rows + max(0, min(num_more, num_blocks or num_more))


def allocate_kv_caches(config: EngineConfig, num_blocks: int, device: torch.device) -> KVCaches:
    """(k, v) of each layer, uninitialized: attention reads no slot before it is written. v of latents has
    heads of size 0, and layers without attention have caches of no heads.

    An encoder ignores `num_blocks`.
    """
    spec = config.model.spec
    if spec.is_causal:
        keeping = [layer for layer in spec.layers if layer.attention.keeps_kv]
        own = iter(_allocate_layers(config, keeping, num_blocks, device))
        none = torch.empty(
            (num_blocks, 0, config.cache.block_size, 0), dtype=_find_dtype(config), device=device
        )
        return share_caches(
            spec, [next(own) if layer.attention.keeps_kv else (none, none) for layer in spec.layers]
        )
    pair = _allocate_layers(config, spec.layers[:_NUM_SCRATCH_LAYERS], count_scratch_blocks(config), device)
    return [pair[layer % len(pair)] for layer in range(spec.num_layers)]


def allocate_states(config: EngineConfig, num_slots: int, device: torch.device) -> Tensor | None:
    """float32 [num_slots, slot_numbers], uninitialized; None for a model without recurrent layers."""
    size = config.model.spec.state_size
    if not size:
        return None
    if device.type == "cpu":
        return allocate_huge(4 * num_slots * size).view(torch.float32).view(num_slots, size)
    return torch.empty((num_slots, size), dtype=torch.float32, device=device)


def share_caches(spec: ModelSpec, own: Sequence[KVCache]) -> KVCaches:
    """Of each layer its own, or that of the layer whose keys and values it reads."""
    sources = [layer.attention.kv_layer for layer in spec.layers]
    return [own[index if source is None else source] for index, source in enumerate(sources)]


def _find_dtype(config: EngineConfig) -> torch.dtype:
    return KV_DTYPES.get(config.cache.kv_cache_dtype) or getattr(torch, config.model.dtype)


def _allocate_layers(
    config: EngineConfig, layers: Sequence[LayerSpec], num_blocks: int, device: torch.device
) -> KVCaches:
    """Layers of one KV group have memory of their own, those of several share places (ipc/spec/kv_groups.py).

    A layer that has a part of a place sees the parts after it as blocks between its own: its ids are so many
    times the core's (`find_table_groups`), and its cache begins at its part.
    """
    kv_dtype, block_size, spec = config.cache.kv_cache_dtype, config.cache.block_size, config.model.spec
    dtype = _find_dtype(config)
    scale_size = SCALE_SIZE if kv_dtype in KV_DTYPES else 0
    shapes = [
        (part.num_kv_heads, block_size, size)
        for part in (layer.attention for layer in layers)
        for size in (part.head_size + scale_size, 0 if part.latent else part.head_size + scale_size)
    ]
    has_null = any(spec.kv_windows)
    num_blocks += has_null
    if len(spec.kv_windows) == 1:
        sizes = [num_blocks * math.prod(shape) for shape in shapes]
        places = [(layer, 0) for layer in range(len(layers))]
    else:
        found, numbers = find_places(spec, kv_dtype), Counter[int]()
        sizes = [num_blocks * found.size * block_size] * (2 * found.count)
        places: list[tuple[int, int]] = []  # of each layer, and which part of it
        for group in (layer.attention.kv_group for layer in layers):
            places.append(divmod(numbers[group], found.shares[group]))
            numbers[group] += 1
    if device.type == "cpu":
        whole = allocate_huge(sum(sizes) * dtype.itemsize).view(dtype)
    else:
        whole = torch.empty(sum(sizes), dtype=dtype, device=device)
    memory = whole.split(sizes)
    for part in memory if has_null else ():
        part[len(part) // num_blocks * (num_blocks - 1) :] = 0  # the null block, which is the last

    def view(index: int, part: int, shape: tuple[int, ...]) -> Tensor:
        size = math.prod(shape)
        count = len(memory[index]) // size - part if size else num_blocks
        return memory[index][part * size :].view(count, *shape)

    return [
        (view(2 * place, part, k_shape), view(2 * place + 1, part, v_shape))
        for (place, part), k_shape, v_shape in zip(places, shapes[::2], shapes[1::2], strict=True)
    ]


def find_table_groups(config: EngineConfig, kv_caches: KVCaches) -> list[TableGroup]:
    """How the ids of the core are those of the caches, for each KV group."""
    spec, scales = config.model.spec, (1,)
    if len(spec.kv_windows) > 1:
        scales = find_places(spec, config.cache.kv_cache_dtype).shares
    sizes = {
        layer.attention.kv_group: len(cache[0])
        for layer, cache in zip(spec.layers, kv_caches, strict=True)
        if layer.attention.num_heads
    }
    return [
        TableGroup(window, scale, (-(-sizes.get(group, scale) // scale) - 1) * scale)
        for group, (window, scale) in enumerate(zip(spec.kv_windows, scales, strict=True))
    ]


def copy_blocks(
    kv_caches: KVCaches,
    layers: Sequence[LayerSpec],
    scales: Sequence[int],
    copies: list[tuple[int, int, int]],
) -> None:
    """Copy K and V of (KV group, source, destination) blocks in that group's layers; no destination is a
    source.

    On a CPU one by one: torch's threads for a gather of two blocks cost 40 ms where others use the cores.
    """
    for group, scale in enumerate(scales):
        pairs = [(scale * source, scale * to) for of, source, to in copies if of == group]
        members = zip(kv_caches, layers, strict=True)
        caches = [
            cache
            for pair, attention in ((pair, layer.attention) for pair, layer in members)
            if attention.keeps_kv and attention.kv_group == group
            for cache in pair
        ]
        if not pairs or not caches:
            continue
        if caches[0].device.type == "cpu":
            for cache in caches:
                for source, destination in pairs:
                    cache[destination].copy_(cache[source])
            continue
        sources, destinations = torch.tensor(pairs, device=caches[0].device).unbind(1)
        for cache in caches:
            cache[destinations] = cache[sources]


def estimate_activation_bytes(config: EngineConfig) -> int:
    """An upper estimate of what a step of max_num_batched_tokens holds beside weights and KV: a layer's
    activations in float32, all rows' logits and a copy of them.
    """
    spec = config.model.spec
    num_tokens = config.scheduler.max_num_batched_tokens
    num_samples = min(config.scheduler.max_num_seqs, num_tokens)
    per_token = 4 * (spec.num_activations_per_token + (0 if spec.stage.is_first else spec.hidden_size))
    num_logits = num_samples * spec.vocab_size if spec.has_logits else 0
    return num_tokens * per_token + 2 * 4 * num_logits + _SCRATCH_BYTES + _count_scratch_bytes(config)


def count_scratch_blocks(config: EngineConfig) -> int:
    """The most blocks that a step's prompts fill: each may leave its last one partly empty."""
    scheduler = config.scheduler
    return -(-scheduler.max_num_batched_tokens // config.cache.block_size) + scheduler.max_num_seqs


def _count_scratch_bytes(config: EngineConfig) -> int:
    spec = config.model.spec
    if spec.is_causal:
        return 0
    tokens = count_scratch_blocks(config) * config.cache.block_size
    sizes = (2 * layer.attention.kv_size for layer in spec.layers[:_NUM_SCRATCH_LAYERS])
    return tokens * sum(sizes) * DTYPE_SIZE_BYTES[config.model.dtype]


def _count_blocks(config: EngineConfig, device: torch.device, free_bytes: int, states_bytes: int) -> int:
    """The number of blocks, by the override, the size in bytes, or the device's memory; 0 without KV.

    `free_bytes`, which may be negative, are for KV and states; these are to take `states_bytes`.
    """
    cache, block_bytes = config.cache, config.block_size_bytes
    free_bytes -= states_bytes
    if not block_bytes:
        return 0
    if config.num_blocks_before is not None:
        noise_bytes = _NOISE_BYTES if device.type == "cuda" else 0
        if config.num_blocks_before * block_bytes <= free_bytes + noise_bytes:
            return config.num_blocks_before
    if cache.num_gpu_blocks_override is not None:
        num_blocks = cache.num_gpu_blocks_override
        _check_one_request(config, num_blocks, "num_gpu_blocks_override", num_blocks)
        _check_available(config, num_blocks, free_bytes, "num_gpu_blocks_override", num_blocks)
        return num_blocks
    if cache.kv_cache_memory_bytes is not None:
        size = cache.kv_cache_memory_bytes
        _check_one_request(config, size // block_bytes, "kv_cache_memory_bytes", size)
        _check_available(config, size // block_bytes, free_bytes, "kv_cache_memory_bytes", size)
        return size // block_bytes
    if device.type == "cuda":
        size = max(0, min(free_bytes, _find_share(config, device) - states_bytes))
        if states_bytes and cache.num_state_slots is None:
            size = int(size / (1 + _SNAPSHOT_FRACTION))
        num_blocks = size // block_bytes
        field, value = "gpu_memory_utilization", cache.gpu_memory_utilization
        _check_one_request(config, num_blocks, field, value, "more, or kv_cache_memory_bytes ")
        return num_blocks
    wanted = config.scheduler.max_num_seqs * config.max_blocks_per_request
    num_engines = config.parallel.data_parallel_size  # they share the memory
    budget = min(_MAX_AUTO_CPU_BYTES, int(free_bytes * _MAX_AUTO_CPU_FRACTION) // num_engines)
    num_blocks = min(wanted, max(0, budget) // block_bytes)
    _check_one_request(config, num_blocks, "kv_cache_memory_bytes", None)
    return num_blocks


def _find_share(config: EngineConfig, device: torch.device) -> int:
    """The bytes for KV in this engine's share of a GPU, as vLLM counts it. May be negative.

    The share is a fraction of the whole device, whatever other processes hold, less what this process has
    taken and what its steps need.
    """
    fraction = config.cache.gpu_memory_utilization
    free, total = torch.cuda.mem_get_info(device)
    left = int(total * fraction) - torch.cuda.memory_reserved(device)
    if left > free:
        text = "gpu_memory_utilization=%s: of this engine's share, %d MiB of %s, other processes hold %d MiB"
        held = (left - free) // _MIB
        _log.warning(text, fraction, int(total * fraction) // _MIB, device, held)
    return left - estimate_activation_bytes(config) - _CUDA_RESERVE_BYTES


def _check_one_request(
    config: EngineConfig, num_blocks: int, field: str, value: float | None, instead: str = ""
) -> None:
    """Raise ConfigError for a cache in which a request of max_model_len could wait for ever."""
    needed, block_size_bytes = config.max_blocks_per_request, config.block_size_bytes
    if num_blocks >= needed:
        return
    least = needed if field == "num_gpu_blocks_override" else needed * block_size_bytes
    text = (
        f"{instead}at least {least} (one request of max_model_len={config.model.max_model_len} tokens takes "
        f"{needed} blocks of {block_size_bytes} bytes, {num_blocks} fit)"
    )
    if num_blocks:
        text += f", or max_model_len at most {config.find_longest(num_blocks)}"
    raise ConfigError(field, value, text + describe_address_space())


def _check_available(config: EngineConfig, num_blocks: int, free_bytes: int, field: str, value: int) -> None:
    """Raise ConfigError for a size that the system would grant now, and kill the worker for later."""
    size = num_blocks * config.block_size_bytes
    if size > free_bytes:
        most = max(0, free_bytes) // config.block_size_bytes
        limit = most if field == "num_gpu_blocks_override" else most * config.block_size_bytes
        numbers = f"({size} bytes wanted, {max(0, free_bytes)} free)"
        raise ConfigError(field, value, f"at most {limit} {numbers}{describe_address_space()}")


def _free_share(device: torch.device, num_ranks: int) -> int:
    """The memory that a rank could still take: each has its own GPU, or all share a CPU's."""
    return _free_bytes(device) if device.type == "cuda" else _free_bytes(device) // num_ranks


def _free_bytes(device: torch.device) -> int:
    """The memory that this process could still take."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    limits = psutil.virtual_memory().available, find_free_memory(), find_free_address_space()
    return min(limit for limit in limits if limit is not None)
