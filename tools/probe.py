"""What only a process with torch can say about a machine: `python -m quire.tools.probe` prints it as JSON.

`quire doctor` runs it in a child, because a frontend never loads torch.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

import torch

from ..kernels.attention import flashinfer_attention
from ..kernels.program import build, native
from ..kernels.triton import triton_runtime
from ..worker import devices
from .bench.machine import find_version


def probe_torch() -> dict[str, Any]:
    """torch's version, what its CPU path is built for, and the GPUs that it sees."""
    return {
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "num_threads": torch.get_num_threads(),
        "cuda_built": torch.version.cuda,
        "gpu_fault": devices.find_gpu_fault(),
        "gpus": [_describe_gpu(index) for index in range(_count_gpus())],
    }


def probe_cpu_kernels() -> dict[str, Any]:
    """Whether the native CPU kernels load here (compiling them at first use), and why not if they do not."""
    complaints: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            complaints.append(record.getMessage())

    logger = logging.getLogger(native.__name__)
    logger.addHandler(Collector())
    logger.propagate = False
    start = time.perf_counter()
    is_native = native.load_library() is not None
    seconds = time.perf_counter() - start
    if is_native:
        detail = f"native, attention included; loaded in {seconds:.2f} s from {build.cache_folder()}"
    else:
        detail = complaints[-1] if complaints else "torch operations; the native kernels do not load"
    return {"is_native": is_native, "detail": " ".join(detail.split())}


def probe_triton() -> dict[str, Any]:
    """Whether Triton's kernels run on the GPU here, and why not; nothing is tried without a GPU."""
    if not torch.cuda.is_available():
        return {"is_needed": False, "is_usable": False, "detail": "not needed without a GPU"}
    if devices.find_gpu_fault() is not None:
        return {"is_needed": False, "is_usable": False, "detail": "not tried: the GPU cannot be used"}
    logging.getLogger(triton_runtime.__name__).propagate = False
    fault = triton_runtime.find_fault("cuda")
    detail = "its kernels run on the GPU" if fault is None else f"slower torch operations instead: {fault}"
    return {"is_needed": True, "is_usable": fault is None, "detail": detail}


def probe_flashinfer() -> dict[str, Any]:
    """Whether attention_backend=FLASHINFER would be FlashInfer's; it is not loaded where no GPU is used."""
    version = find_version("flashinfer-python")
    if not torch.cuda.is_available() or devices.find_gpu_fault() is not None:
        there = "not needed without a GPU" if version is None else f"{version}, not used without a GPU"
        return {"is_needed": False, "is_usable": False, "detail": there}
    fault = flashinfer_attention.find_fault()
    if fault is None:
        detail = f"{version or 'of no known version'}, used where attention_backend=FLASHINFER asks for it"
    elif fault == flashinfer_attention.NOT_INSTALLED:
        detail = "not installed: attention_backend=FLASHINFER (pip install flashinfer-python)"
    else:
        detail = f"{version or 'of no known version'}, but {fault}"
    return {"is_needed": True, "is_usable": fault is None, "detail": detail}


def _count_gpus() -> int:
    """That can be used: torch counts those of a driver that is too old for it, too."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _describe_gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    capability = f"{properties.major}.{properties.minor}"
    free, _ = torch.cuda.mem_get_info(index)
    memory = {"memory_bytes": properties.total_memory, "free_bytes": free}
    return {"name": properties.name, "capability": capability, **memory}


def main() -> None:
    """Print one JSON object, or end with the reason why QUIRE_NATIVE_KERNELS is refused."""
    try:
        report = probe_torch() | {
            "cpu_kernels": probe_cpu_kernels(),
            "triton": probe_triton(),
            "flashinfer": probe_flashinfer(),
        }
    except ValueError as error:
        sys.exit(str(error))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
