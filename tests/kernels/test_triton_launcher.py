"""Direct launches through Triton's own launcher, in front of a driver of CUDA that runs nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")

_TIMEOUT_S = 280.0
pytestmark = [
    pytest.mark.slow,  # compiles for half a minute; triton/test_direct_launch.py has the parts
    pytest.mark.timeout(_TIMEOUT_S + 20),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the driver of CUDA is here"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="Triton's launcher is compiled with gcc"),
]

# Every launch three times: by Triton, directly, and directly with another number of requests.
_SCRIPT = """
import ctypes, os, sys
import torch
from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils
from triton.runtime import driver

fake = ctypes.CDLL("libcuda.so.1")
sizes = (ctypes.c_int * 64).in_dll(fake, "fake_sizes")
make, call = CudaLauncher.__init__, CudaLauncher.__call__

def keep_signature(self, source, metadata):
    make(self, source, metadata)
    types = [one for one in source.signature.values() if one != "constexpr"]
    self.sizes = [4 if one in ("i32", "fp32") else 8 for one in types]

def tell_sizes(self, *args):
    sizes[:] = self.sizes + [0] * (64 - len(self.sizes))
    call(self, *args)

CudaLauncher.__init__, CudaLauncher.__call__ = keep_signature, tell_sizes

class Driver(CudaDriver):
    def __init__(self):
        self.utils, self.launcher_cls = CudaUtils(), CudaLauncher
        self.get_device_capability = lambda device: (9, 0)
        self.get_current_device, self.get_current_stream = lambda: 0, lambda device: 77

driver.set_active(Driver())
from quire.kernels.triton import triton_faults
triton_faults.find_capability = lambda device: (9, 0)
from quire.kernels.attention.attention_plan_triton import launch_plan, plan_attention
from quire.kernels.triton.direct_launch import launch_directly
from quire.kernels.linear.linear_triton import launch_linear
from quire.kernels.norm.rms_norm_triton import launch_rms_norm

made, place = {}, 0
def allocate(self, shape, dtype=None, **_):
    global place
    place += 1
    key = place, tuple(shape) if not isinstance(shape, int) else (shape,), dtype or self.dtype
    return made.setdefault(key, torch.zeros(key[1], dtype=key[2]))
torch.Tensor.new_empty = allocate
torch.empty_like = lambda like: allocate(like, like.shape)
torch.empty = lambda shape, dtype, device: allocate(x, shape, dtype)

x, weight, norm = (torch.zeros(shape, dtype=torch.bfloat16) for shape in ((64, 256), (512, 256), (256,)))
starts, lengths = (torch.zeros(shape, dtype=torch.int32) for shape in (65, 64))

def launch(rows):
    global place
    place = 0
    with open(os.environ["FAKE_CUDA_LOG"], "a") as log:
        log.write("--\\n")
    launch_rms_norm(x[:rows], None, norm, 1e-6, 0.0, False)
    launch_linear(x[:rows], weight)
    plan = plan_attention(rows, 0, rows, 2, 128, 132, False)
    launch_plan(plan, starts[:rows + 1], lengths[:rows], None)

before = [launch(rows) for rows in (5, 7)]
launch_directly()
for rows in (5, 5, 7):  # the first is Triton's again, which shows the variant
    launch(rows)
slow = []
from triton.runtime.jit import JITFunction
run = JITFunction.run
JITFunction.run = lambda self, *args, **options: slow.append(self) or run(self, *args, **options)
launch(7)
print(len(slow))
"""


def test_a_direct_launch_reaches_the_driver_as_tritons_own_does(tmp_path: Path) -> None:
    include = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    source = Path(__file__).with_name("fake_libcuda.c")
    library = tmp_path / "libcuda.so.1"
    command = ["gcc", "-shared", "-fPIC", "-w", f"-I{include}", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([*command, str(source), "-o", str(library)], check=True, timeout=60)
    log = tmp_path / "launches"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {
        "LD_LIBRARY_PATH": str(tmp_path),
        "TRITON_LIBCUDA_PATH": str(tmp_path),
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        "FAKE_CUDA_LOG": str(log),
    }
    command = [sys.executable, "-P", "-W", "ignore", "-c", _SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "0\n"  # of the last launches, that went Triton's way
    passes = [one.splitlines() for one in log.read_text().split("--\n")[1:]]
    by_triton, other, first, direct, direct_other, last = passes
    assert first == direct == by_triton
    assert direct_other == last == other
    assert other != by_triton
    names = [line.partition(" ")[0] for line in by_triton]
    assert names == ["_rms_norm", "_linear_few", "_plan_kernel"]
    assert all(" stream 77 pdl 1 :" in line for line in by_triton)
