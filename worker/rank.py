"""The start of a worker as one of several ranks: it joins the others, takes its cores, names its weights."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

import msgspec
import torch

from ..ipc.errors import ConfigError
from ..ipc.files.file_samples import add_samples
from ..ipc.processes.cpu_cores import describe_ranks, divide_cores, list_cores
from ..ipc.spec.config import EngineConfig, ParallelConfig
from ..ipc.spec.model_spec import DTYPE_SIZE_BYTES
from ..kernels.group.device_group import DeviceGroup
from ..kernels.group.shared_group import SPIN_US, SharedGroup
from ..kernels.program import native

_log = logging.getLogger(__name__)

_MIN_RING_BYTES, _MAX_HIDDEN_BYTES = 1 << 16, 64 << 20
_TOKEN_BYTES = 8
_KINDS = ("cpu", "cuda")  # of devices


def check_num_ranks(parallel: ParallelConfig, device: torch.device) -> None:
    """Raise ConfigError for ranks that this machine's GPUs cannot run."""
    if device.type != "cuda" or parallel.num_ranks == 1:
        return
    if parallel.pipeline_parallel_size > 1:
        text = "1 on a GPU, where tensor_parallel_size shares a model out; or device=cpu"
        raise ConfigError("pipeline_parallel_size", parallel.pipeline_parallel_size, text)
    num_gpus = torch.cuda.device_count() - int(parallel.device.partition(":")[2] or 0)
    if parallel.tensor_parallel_size > num_gpus:
        text = f"at most {num_gpus}: a rank has a GPU of its own, and so many can be seen here; or device=cpu"
        raise ConfigError("tensor_parallel_size", parallel.tensor_parallel_size, text)


def join_group(path: str, rank: int, config: EngineConfig, device: torch.device) -> SharedGroup:
    """Join the other ranks by the file that they share, before `take_cores`. Returns when all have joined.

    Raises ConfigError without native kernels, or if the ranks' devices are of several kinds.
    """
    if native.load_library() is None:
        raise ConfigError(*config.parallel.why_ranks, "1 without the native CPU kernels")
    size, num_stages = config.parallel.num_ranks, config.parallel.pipeline_parallel_size
    spin_us = 0 if divide_cores(list_cores(), size) is None else SPIN_US
    if device.type == "cpu":
        ring_bytes = find_ring_bytes(config)
        group = SharedGroup(path, rank, size, spin_us=spin_us, num_stages=num_stages, ring_bytes=ring_bytes)
        check_devices(group, config, device)
        return group
    group = DeviceGroup(path, rank, size, device, spin_us, sums_in_order=config.wants_exact)
    check_devices(group, config, device)
    group.connect()
    if rank == 0 and not config.model.enforce_eager:
        _log.warning("steps run without CUDA graphs: tensor_parallel_size=%d", size)
    return group


def check_devices(group: SharedGroup, config: EngineConfig, device: torch.device) -> None:
    """Raise ConfigError if the ranks have found devices of several kinds. All ranks wait for each other."""
    kinds = [_KINDS[number] for number in group.exchange(_KINDS.index(device.type))]
    if len(set(kinds)) > 1:
        kinds_found = ", ".join(f"rank {rank} has {kind}" for rank, kind in enumerate(kinds))
        raise ConfigError("device", config.parallel.device, f"one that all ranks find ({kinds_found})")


def find_ring_bytes(config: EngineConfig) -> int:
    """The size of the ring between two stages, a power of 2: for the hidden states of two steps, if they are
    not too large, and for the tokens of all steps in flight.
    """
    scheduler, model = config.scheduler, config.model
    token_bytes = model.spec.hidden_size * DTYPE_SIZE_BYTES[model.dtype]
    hidden = min(2 * scheduler.max_num_batched_tokens * token_bytes, _MAX_HIDDEN_BYTES)
    # Two more steps' tokens than are in flight; each step's follow their number.
    tokens = (scheduler.max_steps_in_flight + 2) * (_TOKEN_BYTES * scheduler.max_num_seqs + _TOKEN_BYTES)
    return 1 << (max(hidden, tokens, _MIN_RING_BYTES) - 1).bit_length()


def take_cores(rank: int, size: int) -> int:
    """Bind this process to the rank's cores, if all ranks can have some. Returns its number of threads."""
    cores = list_cores()
    parts = divide_cores(cores, size)
    if parts is None:
        if rank == 0:
            _log.warning("%s", describe_ranks(cores, size))
        return 1
    os.sched_setaffinity(0, [core.processor for core in parts[rank]])
    return len(parts[rank])


def compute_weights_id(config: EngineConfig) -> str:
    """A hash of the configuration and of samples of the weight files, which must be equal on all ranks."""
    same = msgspec.structs.replace(config, fault_hooks="")
    digest = hashlib.sha256(msgspec.msgpack.encode(same))
    for name in config.model.weight_files:
        add_samples(digest, Path(config.model.model, name))
    return digest.hexdigest()[:16]
