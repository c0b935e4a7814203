"""What a case of `quire bench kernels` is, and how it is timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...ipc.spec.model_spec import AttentionSpec, KVCacheDtype
from ...kernels.attention.narrow_cache import KV_DTYPES, make_narrow
from ...kernels.program.huge_pages import allocate_huge
from ...worker.attention.metadata import AttentionMetadata

Calls = Sequence[Callable[[], object]]
_BLOCK_SIZE = 16  # tokens
_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Case:
    """One row: `calls` are made in turn, each on data of its own; so are torch's."""

    op: str
    shape: str
    dtype: torch.dtype
    calls: Calls
    torch_calls: Calls
    num_bytes: int  # that must be moved
    num_flops: int = 0
    is_resident: bool = False  # its data stay in a cache between calls


@dataclass(frozen=True, slots=True)
class Bench:
    """What all cases share. `cold_bytes`: how much memory a case that is not resident goes through."""

    device: torch.device
    cold_bytes: int

    def count_copies(self, num_bytes: int) -> int:
        """How many copies of a case's data fill `cold_bytes`."""
        return max(1, -(-self.cold_bytes // num_bytes))

    def noise(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Values around 0 of standard deviation 1."""
        return torch.randn(shape, device=self.device).to(dtype)

    def make_step(self, query_lens: list[int], seq_lens: list[int]) -> AttentionMetadata:
        """Requests whose blocks are spread over the cache at random."""
        counts = [-(-length // _BLOCK_SIZE) for length in seq_lens]
        blocks = torch.randperm(sum(counts), dtype=torch.int32).split(counts)
        tables = torch.nn.utils.rnn.pad_sequence(list(blocks), batch_first=True)
        slots = [
            int(table[position // _BLOCK_SIZE]) * _BLOCK_SIZE + position % _BLOCK_SIZE
            for table, query_len, seq_len in zip(blocks, query_lens, seq_lens, strict=True)
            for position in range(seq_len - query_len, seq_len)
        ]
        starts = np.cumsum([0, *query_lens], dtype=np.int32)
        lengths = np.array(seq_lens, dtype=np.int32)
        return AttentionMetadata(
            query_starts=torch.from_numpy(starts).to(self.device),
            seq_lens=torch.from_numpy(lengths).to(self.device),
            block_tables=tables.to(self.device),
            slot_mapping=torch.tensor(slots, dtype=torch.int64, device=self.device),
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
            query_starts_host=starts,
            seq_lens_host=lengths,
        )

    def make_cache(
        self,
        spec: AttentionSpec,
        step: AttentionMetadata,
        dtype: torch.dtype,
        kv_dtype: KVCacheDtype = "auto",
    ) -> tuple[Tensor, Tensor]:
        """K and V of a layer, full of noise: attention's speed does not depend on the layout of a block."""
        num_blocks = int((step.seq_lens + _BLOCK_SIZE - 1).div(_BLOCK_SIZE, rounding_mode="floor").sum())
        size = (num_blocks, spec.num_kv_heads, _BLOCK_SIZE, spec.head_size)
        key, value = self.noise(*size, dtype=dtype), self.noise(*size, dtype=dtype)
        if kv_dtype != "auto":
            key, value = (make_narrow(part, KV_DTYPES[kv_dtype]) for part in (key, value))
        return copy_cache((key, value))


def copy_cache(cache: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The same in memory of its own; on a CPU in huge pages, as the worker has its cache."""
    if cache[0].device.type != "cpu":
        return cache[0].clone(), cache[1].clone()
    key, value = (allocate_huge(part.nbytes).view(part.dtype).view(part.shape) for part in cache)
    return key.copy_(cache[0]), value.copy_(cache[1])


def time_case(case: Case, device: torch.device, seconds: float) -> tuple[float, float]:
    """Seconds of a call, ours and torch's: the best of alternating rounds, for `seconds` together."""
    contenders = (case.calls, case.torch_calls)
    best = [float("inf")] * len(contenders)
    for calls in contenders:
        calls[0]()
    for _ in range(_ROUNDS):
        for place, calls in enumerate(contenders):
            best[place] = min(best[place], _time_calls(calls, device, seconds / _ROUNDS / len(contenders)))
    return best[0], best[1]


def _time_calls(calls: Calls, device: torch.device, seconds: float) -> float:
    """Mean seconds of a call over as many as fit, each on the next of its data."""
    _wait(device)
    start = time.perf_counter()
    count = 0
    while True:
        for call in calls:
            call()
            count += 1
            if device.type == "cpu" and time.perf_counter() - start > seconds:
                return (time.perf_counter() - start) / count
        _wait(device)  # a GPU is asked once a pass: the calls queue up meanwhile
        if time.perf_counter() - start > seconds:
            return (time.perf_counter() - start) / count


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
