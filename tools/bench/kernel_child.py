"""The torch half of `quire bench kernels`: `python -m quire.tools.bench.kernel_child REQUEST_JSON`.

Prints JSON lines: the device's ceilings, a row for each case as it is measured, and the ceilings once more.
"""

from __future__ import annotations

import sys
import time

import msgspec
import torch

from ...ipc.processes.cgroup import count_processors
from .ceilings import MEMORY_READ_BYTES, measure_copy_rate, measure_matrix_rate, measure_read_rate
from .kernel_case import Bench, Calls, Case
from .kernel_cases import MAKERS
from .kernel_rows import Ceilings, KernelReport, KernelRequest, KernelRow

_ROUNDS = 5
_CACHE_READ_BYTES = 2**20
_GPU_CACHE_READ_BYTES = 16 * 2**20
_GPU_COLD_BYTES = 512 * 2**20  # past an L2 of 50 MB
_DTYPE_NAMES = {
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.int8: "int8",
    torch.uint4: "int4",  # pyright: ignore[reportAttributeAccessIssue]
}


def measure(request: KernelRequest) -> None:
    """Measure everything that was asked for and print it."""
    torch.manual_seed(0)
    torch.set_num_threads(count_processors())
    device = torch.device(request.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    _print(KernelReport(ceilings=measure_ceilings(device)))
    bench = Bench(device, _GPU_COLD_BYTES if device.type == "cuda" else MEMORY_READ_BYTES)
    with torch.inference_mode():
        for op in request.ops:
            for case in MAKERS[op](bench):
                _print(KernelReport(row=measure_case(case, device, request.seconds)))
    _print(KernelReport(ceilings=measure_ceilings(device)))


def measure_ceilings(device: torch.device) -> Ceilings:
    """What the rows are held against."""
    is_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_gpu else "cpu"
    return Ceilings(
        device=name,
        read_bytes_per_s=measure_read_rate(device.type, MEMORY_READ_BYTES),
        copy_bytes_per_s=measure_copy_rate(device.type, MEMORY_READ_BYTES // 2),
        cache_bytes_per_s=measure_read_rate(
            device.type, _GPU_CACHE_READ_BYTES if is_gpu else _CACHE_READ_BYTES
        ),
        bf16_flops_per_s=measure_matrix_rate(device.type, "bfloat16"),
        f32_flops_per_s=measure_matrix_rate(device.type, "float32"),
    )


def measure_case(case: Case, device: torch.device, seconds: float) -> KernelRow:
    """Ours and torch's in alternating rounds; the best of each, for `seconds` together."""
    contenders = (case.calls, case.torch_calls)
    best = [float("inf")] * len(contenders)
    for calls in contenders:
        calls[0]()
    for _ in range(_ROUNDS):
        for place, calls in enumerate(contenders):
            best[place] = min(best[place], _time_calls(calls, device, seconds / _ROUNDS / len(contenders)))
    return KernelRow(
        op=case.op,
        shape=case.shape,
        dtype=_DTYPE_NAMES[case.dtype],
        seconds=best[0],
        torch_seconds=best[1],
        num_bytes=case.num_bytes,
        num_flops=case.num_flops,
        is_resident=case.is_resident,
    )


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


def _print(report: KernelReport) -> None:
    sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    measure(msgspec.json.decode(sys.argv[1], type=KernelRequest))
