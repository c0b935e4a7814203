"""Compiles Triton kernels for GPUs that are not here: `record_launches` takes launchers' calls instead.

Triton's own binder says which launches are one variant, so what is counted is what a GPU would compile. For a
process of its own: Triton must not interpret, and nothing is run.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from ...kernels.triton import triton_faults

ARCHITECTURES = (80, 89, 90, 100)
# Bytes of shared memory that a program may have (CUDA C++ Programming Guide, technical specifications).
SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
_REGISTERS = re.compile(r"REG:(\d+)")
_SPILLS = re.compile(r"\b(?:STL|LDL)\b")
_WAITS = re.compile(r"cp\.async\.wait_group\s+(?:0x)?(\d+)")


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel as it would be launched, for one architecture. Equal keys are one variant."""

    kernel: Any
    grid: tuple[int, ...]
    key: str
    options: Any
    signature: dict[str, str]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    target: GPUTarget

    @property
    def name(self) -> str:
        """The kernel's function."""
        return self.kernel.fn.__name__


@dataclass(frozen=True, slots=True)
class Compiled:
    """What the compiler made of a launch."""

    name: str
    grid: tuple[int, ...]
    asm: dict[str, Any]  # ttir, ttgir, llir, ptx, cubin
    shared_bytes: int
    copies_in_flight: int  # groups of asynchronous copies that a wait leaves, 0: each is waited for at once

    @property
    def num_registers(self) -> int:
        """Of a thread."""
        return _read_resources(self.asm["cubin"])[0]

    @property
    def num_spills(self) -> int:
        """Instructions that put away what does not fit the registers, or bring it back."""
        return _read_resources(self.asm["cubin"])[1]

    @property
    def has_wgmma(self) -> bool:
        """Whether it has Hopper's matrix instruction."""
        return "wgmma.mma_async" in self.asm["ptx"]


def is_interpreting() -> bool:
    """Whether Triton was imported to interpret, so that nothing can be compiled."""
    runtime: Any = triton
    return bool(runtime.knobs.runtime.interpret)


def record_launches(call: Callable[[], object], architecture: int = 90) -> list[Launch]:
    """What `call` launches, in order; launches return at once and leave their tensors alone."""
    assert not is_interpreting()
    found: list[Launch] = []
    with _replaced_run(found, GPUTarget("cuda", architecture, 32)):
        call()
    return found


def compile_launches(call: Callable[[], object], architecture: int = 90) -> list[Compiled]:
    """The same, each compiled."""
    return [compile_launch(launch) for launch in record_launches(call, architecture)]


def compile_launch(launch: Launch) -> Compiled:
    """Through Triton's compiler and NVIDIA's assembler; from Triton's cache if it is there."""
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    done: Any = triton.compile(source, target=launch.target, options=launch.options.__dict__)
    waits = [int(count) for count in _WAITS.findall(done.asm["ptx"])]
    return Compiled(launch.name, launch.grid, done.asm, done.metadata.shared, max(waits, default=0))


@contextmanager
def _replaced_run(found: list[Launch], target: GPUTarget) -> Generator[None]:
    def find_capability(_: torch.device) -> tuple[int, int]:
        return divmod(int(target.arch), 10)

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        assert not warmup
        backend, binder = _make_binder(self, target)
        bound, specialization, rest = binder(*args, **options)
        parsed, signature, constants, attributes = self._pack_args(
            backend, options, bound, specialization, rest
        )
        key = f"{self.fn.__name__} {specialization} {rest}"
        shape: tuple[int, ...] = grid(bound) if callable(grid) else grid  # pyright: ignore
        found.append(Launch(self, shape, key, parsed, signature, constants, attributes, target))

    run, JITFunction.run = JITFunction.run, record
    find, triton_faults.find_capability = triton_faults.find_capability, find_capability
    try:
        yield
    finally:
        JITFunction.run = run
        triton_faults.find_capability = find


@cache
def _make_binder(kernel: Any, target: GPUTarget) -> tuple[Any, Any]:
    backend = make_backend(target)
    return backend, create_function_from_signature(kernel.signature, kernel.params, backend)


@cache
def _read_resources(cubin: bytes) -> tuple[int, int]:
    """(registers of a thread, instructions on its stack), by the tools that Triton brings: 0.3 s a kernel.

    Not the stack's size: ptxas keeps 8 bytes of some kernels that never touch them.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = _run_tool("cuobjdump", "--dump-resource-usage", file.name)
        code = _run_tool("nvdisasm", "--print-code", file.name)
    found = _REGISTERS.search(text)
    assert found is not None, text
    return int(found[1]), len(_SPILLS.findall(code))


def _run_tool(name: str, *arguments: str) -> str:
    command = [find_tool(name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=240).stdout


def find_tool(name: str) -> str:
    """A program of CUDA's that comes with Triton."""
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def make(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor of the meta device: shapes without memory are all that a launch that is recorded needs."""
    return torch.empty(shape, dtype=dtype, device="meta")
