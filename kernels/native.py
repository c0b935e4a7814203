"""The C++ kernels of this folder, compiled once per machine and source and loaded with ctypes.

They have threads of their own, which sleep when there is nothing to do (thread_pool.h). Whatever goes wrong
(no compiler, no write permission, another platform) costs one log line and the torch path is used, as it is
on demand with QUIRE_NATIVE_KERNELS=0: to find out whether a kernel is at fault.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

_LOGGER = logging.getLogger(__name__)

SWITCH = "QUIRE_NATIVE_KERNELS"
SWITCH_ALLOWED = "0 (torch operations take the place of the native CPU kernels), 1, or not set"

_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-pthread")
_COMPILE_TIMEOUT_S = 120.0

_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
# Arguments of each exported function, as the .cpp of the same name declares them.
_SIGNATURES: dict[str, tuple[type[ctypes._SimpleCData[object]], ...]] = {  # pyright: ignore[reportAssignmentType, reportPrivateUsage]
    "quire_set_num_threads": (_INT,),
    "quire_argmax": (_POINTER, _INT, _LONG, _POINTER, _POINTER),
    "quire_gather_step": (_POINTER, _POINTER, _POINTER, _INT, _POINTER),
    "quire_decoder_layout": (_INT,),
    "quire_decoder_workspace": (_POINTER, _POINTER),
    "quire_decoder_forward": (_POINTER, _POINTER, _POINTER, _POINTER),
    "quire_linear_best_variant": (),
    "quire_linear_has_variant": (_INT,),
    "quire_linear_packed_bytes": (_INT, _INT, _INT),
    "quire_linear_pack": (_INT, _POINTER, _INT, _INT, _POINTER),
    "quire_linear_quantize": (_INT, _POINTER, _INT, _INT, _POINTER, _POINTER),
    "quire_linear": (_INT, _INT, _INT, _POINTER, _INT, _INT, _POINTER, _INT, _POINTER, _POINTER, _POINTER),
    "quire_rms_norm": (_INT, _POINTER, _POINTER, _POINTER, _POINTER, _INT, _INT, _FLOAT),
    "quire_silu_and_multiply": (_INT, _POINTER, _POINTER, _INT, _INT),
    "quire_gelu_and_multiply": (_INT, _INT, _POINTER, _POINTER, _INT, _INT),
    "quire_rotate_and_write": (_INT, _POINTER, _INT, *[_POINTER] * 4, _FLOAT, *[_POINTER] * 3, *[_INT] * 4),
    "quire_paged_attention": (
        *(_INT, _POINTER, _LONG, _POINTER, _POINTER, _POINTER, _POINTER, _LONG, _POINTER, _POINTER),
        *[_INT] * 6,
        _FLOAT,
    ),
    "quire_attention_variant": (_INT,),
    "quire_sample": (_POINTER, _INT, _INT, *[_POINTER] * 7),
    "quire_force_attention_variant": (_INT,),
}
# What they return, where it is not nothing.
_RESULTS = {
    "quire_attention_variant": _INT,
    "quire_gather_step": _INT,
    "quire_decoder_layout": _INT,
    "quire_decoder_workspace": _LONG,
    "quire_linear_best_variant": _INT,
    "quire_linear_has_variant": _INT,
    "quire_linear_packed_bytes": _LONG,
}


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """The compiled kernels, None where they cannot be had or are switched off.

    A machine's first use compiles for seconds. Raises ValueError as `is_switched_off`.
    """
    try:
        if is_switched_off():
            raise RuntimeError(f"{SWITCH}=0")
        library = ctypes.CDLL(str(_build_library()))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        _LOGGER.warning("native CPU kernels are off, torch operations take their place: %s", error)
        return None
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = _RESULTS.get(name)
    library.quire_set_num_threads(torch.get_num_threads())
    return library


def set_num_threads(count: int) -> None:
    """Threads of torch's operations and of the native kernels, the caller's included."""
    torch.set_num_threads(count)
    library = load_library() if load_library.cache_info().currsize else None
    if library is not None:
        library.quire_set_num_threads(count)


def find_library(dtype: torch.dtype, device: torch.device) -> ctypes.CDLL | None:
    """The compiled kernels if they compute this type on this device."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return None
    return load_library()


def is_switched_off() -> bool:
    """Whether QUIRE_NATIVE_KERNELS=0. Raises ValueError for another value than 0 and 1."""
    value = os.environ.get(SWITCH, "1")
    if value not in ("0", "1"):
        raise ValueError(f"{SWITCH}={value!r}: {SWITCH_ALLOWED}")
    return value == "0"


def cache_folder() -> Path:
    """Where compiled kernels are kept: $XDG_CACHE_HOME/quire or ~/.cache/quire."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "quire"


def _build_library() -> Path:
    """The library's file, compiled now unless a run on the same kind of machine left it."""
    folder = Path(__file__).parent
    sources = sorted(folder.glob("*.cpp"))
    digest = hashlib.sha256("\0".join((*_FLAGS, _cpu_name())).encode())
    for path in (*sources, *sorted(folder.glob("*.h"))):
        digest.update(path.read_bytes())
    target = cache_folder() / f"kernels-{digest.hexdigest()[:24]}.so"
    _check_private(target.parent)
    if not target.exists():
        _LOGGER.info("compiling the CPU kernels for this machine, which is done once")
        _compile(sources, target)
    return target


def _check_private(folder: Path) -> None:
    """What is loaded from here runs as this user, so nobody else may write here."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise RuntimeError(f"{folder} belongs to another user or others may write to it")


def _compile(sources: list[Path], target: Path) -> None:
    """Compile the sources in parallel, link them, and put the library in place in one step."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise RuntimeError("no C++ compiler (g++ or c++) is on PATH")
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        objects = [Path(scratch) / f"{source.stem}.o" for source in sources]
        jobs = [
            [compiler, *_FLAGS, "-c", str(source), "-o", str(output)]
            for source, output in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(len(jobs)) as pool:
            list(pool.map(_run_compiler, jobs))
        library = Path(scratch) / target.name
        _run_compiler([compiler, "-shared", "-pthread", *map(str, objects), "-o", str(library)])
        library.replace(target)


def _run_compiler(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"{command[0]} failed: {result.stderr.strip()[:500]}")


def _cpu_name() -> str:
    """What -march=native looks at: the processor's model and features."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
