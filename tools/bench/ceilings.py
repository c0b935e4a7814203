"""What the device allows, measured with torch: bytes read, bytes copied, and multiply-adds a second.

`python -m quire.tools.bench.ceilings DEVICE DTYPE SIZE_BYTES` prints one JSON object; the bench runs it as a
child, since only it needs torch. Every figure is the best of some rounds and of some forms of the same work.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import msgspec

from ...ipc.processes.process import module_command

MEMORY_READ_BYTES = 2**30  # past the largest cache of a server's processor
_GEMM_SHAPES = ((256, 1024, 3072), (1024, 1024, 3072), (1024, 4096, 4096))  # rows, K, N
_GPU_GEMM_SHAPES = ((4096, 4096, 4096), (8192, 8192, 8192))
_PACKED_DTYPES = ("bfloat16", "float32")  # those that oneDNN multiplies on every processor with AVX-512
_ROUNDS = 5
_MIN_CALLS_S = 0.002  # a timed stretch is at least this long, since a cache is read in microseconds
_TIMEOUT_S = 120.0
_Rates = TypeVar("_Rates", bound=msgspec.Struct)


class MachineRates(msgspec.Struct, frozen=True):
    """Best of a few rounds, with all usable cores, or of the GPU."""

    read_bytes_per_s: float
    flops_per_s: float  # of a matrix product in the number format that was asked for
    device: str = "cpu"


def take_better(first: _Rates, second: _Rates) -> _Rates:
    """The best of both, of one device: a ceiling is what it can do, and a shared machine cannot always."""
    return type(first)(*map(max, msgspec.structs.astuple(first), msgspec.structs.astuple(second)))


def measure_rates(device: str, dtype: str, size_bytes: int) -> MachineRates:
    """Measure in a child process, a few seconds. `size_bytes`: what is read again and again.

    device 'auto': CUDA if torch has it. Raises CalledProcessError with torch's words on stderr.
    """
    command = module_command("quire.tools.bench.ceilings", device, dtype, str(size_bytes))
    out = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=_TIMEOUT_S).stdout
    return msgspec.json.decode(out, type=MachineRates)


def measure_read_rate(device: str, size_bytes: int) -> float:
    """Bytes a second of sums over a block of that size."""
    import torch

    block = torch.ones(max(1, size_bytes // 8), dtype=torch.int64, device=device)
    views = (block, block.view(torch.float32))
    return block.nbytes / min(time_best(view.sum, device) for view in views)


def measure_copy_rate(device: str, size_bytes: int) -> float:
    """Bytes read plus bytes written a second, copying a block of that size."""
    import torch

    source = torch.ones(size_bytes // 8, dtype=torch.int64, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / time_best(lambda: target.copy_(source), device)


def measure_matrix_rate(device: str, dtype: str) -> float:
    """Operations a second of x W^T, an addition and a multiplication counted as two."""
    import torch

    kind = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[dtype]
    rates: list[float] = []
    for rows, num_in, num_out in _GEMM_SHAPES if device == "cpu" else _GPU_GEMM_SHAPES:
        x = torch.randn(rows, num_in, device=device).to(kind)
        weight = torch.randn(num_out, num_in, device=device).to(kind)

        forms: list[Callable[[], Any]] = [partial(torch.nn.functional.linear, x, weight)]
        if device == "cpu" and dtype in _PACKED_DTYPES and torch.backends.mkldnn.is_available():
            forms.append(_make_packed_linear(x, weight))
        rates += [2 * rows * num_in * num_out / time_best(form, device) for form in forms]
    return max(rates)


def _make_packed_linear(x: Any, weight: Any) -> Callable[[], Any]:
    """oneDNN's with weights in its own layout. In float32 torch asks MKL otherwise, which on a Zen 5 has 40 %
    of its rate.
    """
    import torch

    ops: Any = torch.ops.mkldnn
    packed = ops._reorder_linear_weight(weight, len(x))
    return partial(ops._linear_pointwise, x, packed, None, "none", [], "")


def time_best(call: Callable[[], object], device: str, rounds: int = _ROUNDS) -> float:
    """Least seconds of a call, each round a stretch of calls that is long enough for the clock."""
    wait = _find_wait(device)
    call()
    wait()
    start = time.perf_counter()
    call()
    wait()
    num_calls = max(1, int(_MIN_CALLS_S / (time.perf_counter() - start)))
    times: list[float] = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(num_calls):
            call()
        wait()
        times.append((time.perf_counter() - start) / num_calls)
    return min(times)


def _find_wait(device: str) -> Callable[[], None]:
    import torch

    return torch.cuda.synchronize if device.startswith("cuda") else lambda: None


def main() -> None:
    """Print the rates as one JSON object."""
    import torch

    from ...ipc.processes.cgroup import count_processors

    device, dtype, size_bytes = sys.argv[1:4]
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(count_processors())
    rates = MachineRates(
        read_bytes_per_s=measure_read_rate(device, int(size_bytes)),
        flops_per_s=measure_matrix_rate(device, dtype),
        device=device,
    )
    sys.stdout.write(msgspec.json.encode(rates).decode() + "\n")


if __name__ == "__main__":
    main()
