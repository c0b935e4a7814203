"""Programmatic dependent launch: a kernel is set up on the GPU while the one before it in its stream ends.

CUDA's programming guide has it under this name; Hopper and later can. A kernel that may be launched so calls
`wait_for_inputs` once, in every program, before any branch. There it waits until all kernels before it have
ended and what they wrote is seen, and lets the next one be set up. Before it a kernel may read weights, and
write nothing. Elsewhere, and for whatever else is launched, kernels run one after the other as ever.
Graphs capture it too, since CUDA 12.3.
"""

from __future__ import annotations

import ctypes
import functools
import typing

import torch
import triton
import triton.language as tl

from . import triton_faults

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:
    gdc_wait = gdc_launch_dependents = None

_jit: typing.Any = triton.jit

IS_ENABLED = True  # the one switch

_MIN_CAPABILITY = (9, 0)
_MIN_DRIVER = 12_030
# Products and sums may be fused: Triton 3.9 warns where that is not said, 3.10 is to leave it.
FUSED = {"enable_fp_fusion": True}
_ON = {"USE_PDL": True, "launch_pdl": True, **FUSED}
_OFF = {"USE_PDL": False, **FUSED}


@_jit
def wait_for_inputs(USE_PDL: tl.constexpr):
    """All that kernels before this one wrote may be read from here on, and anything be written."""
    if USE_PDL:
        gdc_wait()  # pyright: ignore[reportOptionalCall]
        gdc_launch_dependents()  # pyright: ignore[reportOptionalCall]


@_jit
def prefetch(at: typing.Any):
    """Have the lines at these addresses brought to the second-level cache; valid ones, of any memory."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


def launch_options(device: torch.device) -> dict[str, bool]:
    """What a launch on this device is given, of a kernel whose last parameter is USE_PDL."""
    is_able = triton_faults.find_capability(device) >= _MIN_CAPABILITY and _is_supported(device.type)
    return _ON if IS_ENABLED and is_able else _OFF


@functools.cache
def _is_supported(device_type: str) -> bool:
    """Whether Triton and the driver can do it; what stands in for a GPU has no driver."""
    return gdc_wait is not None and (device_type != "cuda" or find_driver() >= _MIN_DRIVER)


def find_driver() -> int:
    """The CUDA release that the driver knows, 12.3 as 12030; 0 if there is none."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value
