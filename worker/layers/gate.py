"""Gates: what a layer gives, times an activation of other columns of the same token."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from ...kernels.choice import choose_kernel, native_library
from ...kernels.linear.product import GATES, launch_product, product_reference
from ...kernels.program.program import Kind, NotNativeError, Product, Program, Slot


class Gate:
    """x * act(y) in the form that the device computes fastest (kernels/linear/product.py)."""

    def __init__(self, act: Literal["sigmoid", "silu"], dtype: torch.dtype, device: torch.device) -> None:
        self._act = act
        self._compute: Callable[[Tensor, Tensor, str], Tensor] = product_reference
        self._is_native = choose_kernel("product", dtype, device) == "native"
        if self._is_native:
            self._compute = partial(launch_product, native_library())

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """[T, N] of x, which may be overwritten, and columns y of other rows."""
        return self._compute(x, y, self._act)

    def emit(self, program: Program, x: Slot, size: int, y: Slot, first: int, stride: int) -> None:
        """The same as an operation, in place; y's columns are those from `first` on of rows of `stride`."""
        if not self._is_native:
            raise NotNativeError("product")
        place = {"first": first, "size": size, "stride": stride, "gate": GATES[self._act]}
        program.add(Kind.PRODUCT, Product(x=x, y=y, **place))
