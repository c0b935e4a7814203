"""Compiles Triton kernels for a GPU that is not here: `compile_launches` takes launchers' calls instead.

For a process of its own: Triton must not interpret, and nothing is run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

HOPPER = GPUTarget("cuda", 90, 32)
_POINTERS = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}
_OPTIONS = ("num_warps", "num_stages", "num_ctas")


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel as it would be launched."""

    name: str
    grid: tuple[int, ...]
    asm: dict[str, Any]  # ttir, ttgir, llir, ptx, cubin
    shared_bytes: int


def compile_launches(call: Callable[[], object]) -> list[Compiled]:
    """Compile for sm_90 what `call` launches; launches return at once and leave their tensors alone."""
    assert not triton.knobs.runtime.interpret
    found: list[Compiled] = []

    def compile_one(self: Any, *args: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> None:
        assert not warmup
        found.append(_compile(self, grid, args, options))

    run, JITFunction.run = JITFunction.run, compile_one
    try:
        call()
    finally:
        JITFunction.run = run
    return found


def _compile(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> Compiled:
    values = dict(zip(kernel.arg_names, args, strict=False)) | options
    compiler = {name: values.pop(name) for name in _OPTIONS if name in values}
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for place, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        signature[parameter.name] = "constexpr" if parameter.is_constexpr else _type_of(value)
        if signature[parameter.name] == "constexpr":
            constants[place,] = value
        elif isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[place,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    done = triton.compile(source, target=HOPPER, options={**compiler, "enable_fp_fusion": True})
    return Compiled(kernel.fn.__name__, grid, done.asm, done.metadata.shared)


def _type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    if value is None or (isinstance(value, int) and value == 1):
        return "constexpr"  # as Triton specializes arguments
    return {int: "i32", float: "fp32"}[type(value)]
