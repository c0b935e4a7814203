"""What this machine allows: measured read bandwidth and matrix rate, and a workload's least time under them.

`python -m quire.tools.bench.floors` prints the measurement as JSON (it needs torch, the bench does not). The
floor of a step is the larger of reading every weight once and its multiply-adds; attention is left out,
so it is optimistic.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from .workloads import SHARED_PREFIX_LEN, Workload

_READ_SIZE_BYTES = 512 * 2**20  # far past any cache
_PROBE_ROUNDS = 5
_PROBE_TIMEOUT_S = 120.0
_GEMM_ROWS, _GEMM_K, _GEMM_N = 256, 1024, 3072
# A model smaller than this stays in the caches, where a read from memory says nothing about it.
MIN_MODEL_SIZE_BYTES = 256 * 2**20


class MachineRates(msgspec.Struct, frozen=True, kw_only=True):
    """Best of a few rounds, with all usable cores."""

    read_bytes_per_s: float
    bf16_flops_per_s: float


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What a step reads and multiplies."""

    num_layer_params: int  # used for every token
    num_head_params: int  # used for every sampled token
    bytes_per_param: int

    @property
    def step_bytes(self) -> int:
        """Bytes of weights that a decode step reads."""
        return (self.num_layer_params + self.num_head_params) * self.bytes_per_param


def compute_floor_s(
    workload: Workload, size: ModelSize, rates: MachineRates, has_shared_prefix: bool
) -> float:
    """Least seconds for the workload if all its requests run at once and a shared prefix is computed once."""
    num_prompt_tokens = workload.num_prompt_tokens
    if has_shared_prefix:
        num_prompt_tokens -= (len(workload.requests) - 1) * SHARED_PREFIX_LEN
    prefill_flops = 2 * num_prompt_tokens * size.num_layer_params
    seconds = prefill_flops / rates.bf16_flops_per_s
    read_s = size.step_bytes / rates.read_bytes_per_s
    flops_per_token = 2 * (size.num_layer_params + size.num_head_params)
    longest = max(request.num_output_tokens for request in workload.requests)
    for step in range(1, longest):  # the first token comes with the prefill
        num_running = sum(request.num_output_tokens > step for request in workload.requests)
        seconds += max(read_s, num_running * flops_per_token / rates.bf16_flops_per_s)
    return seconds


def measure_rates() -> MachineRates:
    """Measure in a child process, since only it needs torch. About 3 s."""
    command = [sys.executable, "-m", "quire.tools.bench.floors"]
    out = subprocess.run(command, capture_output=True, check=True, timeout=_PROBE_TIMEOUT_S).stdout
    return msgspec.json.decode(out, type=MachineRates)


def _probe() -> MachineRates:
    import torch

    from .machine import count_cores

    torch.set_num_threads(count_cores())
    block = torch.ones(_READ_SIZE_BYTES // 8, dtype=torch.int64)
    rows = torch.randn(_GEMM_ROWS, _GEMM_K, dtype=torch.bfloat16)
    weight = torch.randn(_GEMM_N, _GEMM_K, dtype=torch.bfloat16)
    read_s = _time_best(lambda: block.sum())
    gemm_s = _time_best(lambda: torch.nn.functional.linear(rows, weight))
    flops = 2 * _GEMM_ROWS * _GEMM_K * _GEMM_N
    return MachineRates(read_bytes_per_s=_READ_SIZE_BYTES / read_s, bf16_flops_per_s=flops / gemm_s)


def _time_best(call: Callable[[], object]) -> float:
    call()
    times: list[float] = []
    for _ in range(_PROBE_ROUNDS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    """Print the rates as one JSON object."""
    print(json.dumps(msgspec.to_builtins(_probe())))


if __name__ == "__main__":
    main()
