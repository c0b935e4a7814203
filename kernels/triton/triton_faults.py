"""Why Triton's kernels cannot run on a GPU, in one line that says what is missing and what to do."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

MIN_CAPABILITY = (8, 0)  # what Triton supports, and the first with bfloat16
MIN_TRITON = (3, 6)  # the oldest that these kernels were interpreted with
_MAX_SHOWN = 300

# Beginnings and parts of what Triton, its compiler and the driver say, and what to do about it.
_ADVICE = (
    ("Failed to find C compiler", "a C compiler is missing: install gcc (apt install gcc), or set CC"),
    ("libcuda.so", "libcuda.so is missing: install NVIDIA's driver (docker: --gpus all), then run ldconfig"),
    ("unsupported toolchain", "NVIDIA's driver is older than this Triton needs: install a newer driver"),
    ("UNSUPPORTED_PTX_VERSION", "NVIDIA's driver is older than this Triton needs: install a newer driver"),
    ("driver version is insufficient", "NVIDIA's driver is older than this torch needs: install a newer one"),
    ("no kernel image", "this torch or Triton was not built for this GPU: pip install a release that is"),
    ("0 active drivers", "Triton finds no driver for this GPU: install NVIDIA's driver, then run ldconfig"),
)


@functools.cache
def find_capability(device: torch.device) -> tuple[int, int]:
    """CUDA's compute capability; (0, 0) of what is no such device."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def find_missing(device: torch.device) -> str | None:
    """What a device or an installation lacks, asked before anything is compiled. None: nothing known."""
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < MIN_CAPABILITY:
            has, needs = ".".join(map(str, capability)), ".".join(map(str, MIN_CAPABILITY))
            name = torch.cuda.get_device_name(device)
            return f"{name} has compute capability {has}, and they need {needs}: a newer card would be faster"
    try:
        import triton
    except ImportError as error:
        if error.name not in (None, "triton"):
            return explain(error)
        return "Triton is not installed: pip install triton"
    version = tuple(int(part) for part in triton.__version__.split(".")[:2] if part.isdigit())
    if version < MIN_TRITON:
        needs = ".".join(map(str, MIN_TRITON))
        return f"Triton {triton.__version__} is too old: pip install 'triton>={needs}'"
    return None


def explain(error: Exception) -> str:
    """One line: what is missing and what to do where that is known, else the error's own words."""
    text = " ".join(str(error).split())
    advice = next((advice for part, advice in _ADVICE if part in text), None)
    if advice is None and isinstance(error, (subprocess.CalledProcessError, OSError)):
        advice = _explain_compiler(error)
    if advice is not None:
        return advice
    return f"{type(error).__name__}: {text}"[:_MAX_SHOWN] if text else type(error).__name__


def _explain_compiler(error: subprocess.CalledProcessError | OSError) -> str | None:
    """Why the C compiler that Triton called has failed."""
    include = sysconfig.get_paths()["include"]
    if isinstance(error, subprocess.CalledProcessError):
        if not Path(include, "Python.h").exists():
            package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
            return f"Python.h is missing in {include}: install Python's headers (apt install {package})"
        return f"the C compiler has failed ({error}): set CC to one that works"
    if isinstance(error, FileNotFoundError) and "CC" in os.environ:
        return f"CC={os.environ['CC']} is no program: set CC to a C compiler"
    return None
