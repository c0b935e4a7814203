"""Triton's own launcher without a GPU and a compiler: what it would compile is counted, nothing is run.

For a process of its own, in which Triton must not interpret. Arguments are bound and specialized by Triton.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction


class Driver:
    """What a launch asks of the driver of an H100."""

    def get_current_device(self) -> int:
        """Of Triton's driver: the only one."""
        return 0

    def get_current_stream(self, _device: int) -> int:
        """Likewise: the default one."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """Likewise: what kernels are compiled for."""
        return GPUTarget("cuda", 90, 32)


class _Kernel:
    """A compiled kernel whose launch does nothing."""

    function = packed_metadata = None

    def launch_metadata(self, *_: Any) -> None: ...

    def run(self, *_: Any) -> None: ...


def count_launches() -> list[str]:
    """From now on launches only add what they would compile to this list: a kernel's name and arguments."""
    assert not knobs.runtime.interpret
    compiled: list[str] = []

    def compile_nothing(
        self: Any,
        key: Any,
        signature: Any,
        device: int,
        constexprs: Any,
        options: Any,
        attrs: Any,
        warmup: bool,
    ) -> _Kernel:
        kernel_cache, _, target, _, _ = self.device_caches[device]
        compiled.append(f"{self.fn.__name__} {key}")
        kernel_cache[key] = kernel = _Kernel()
        known = inspect.signature(self._call_hook).parameters
        targets = (target,) if "target" in known else ()  # Triton 3.6 takes none
        self._call_hook(
            knobs.runtime.jit_post_compile_hook,
            *(key, signature, *targets, device, constexprs, options, [attrs], warmup),
        )
        return kernel

    triton.runtime.driver.set_active(Driver())  # pyright: ignore[reportArgumentType]
    JITFunction._do_compile = compile_nothing  # pyright: ignore[reportPrivateUsage]
    # What kernels would have written: zeros are tokens and logits like others.
    torch.Tensor.new_empty = torch.Tensor.new_zeros
    torch.empty_like = torch.zeros_like
    return compiled
