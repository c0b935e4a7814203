"""Layers of Mamba-2 (kernels/recurrent/mamba2.py). Legend: T tokens, I numbers of all heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ...ipc.spec.recurrent_spec import Mamba2Spec
from ...kernels.choice import choose_kernel, native_library
from ...kernels.linear.product import GATES, launch_product, product_reference
from ...kernels.program.program import Kind, NotNativeError, Product, Program, Scan, Slot
from ...kernels.recurrent.mamba2 import Mamba2, launch_mamba2, make_table, mamba2_reference
from ...kernels.recurrent.states import RequestStates
from ..attention.metadata import AttentionMetadata
from .linear import Linear
from .mixer import Mixer
from .norm import RMSNorm
from .rotary import Angles, AngleSlots
from .short_conv import Convolution, find_states


class Mamba2Scan:
    """The recurrence in the form that the device has."""

    def __init__(self, scan: Mamba2, dtype: torch.dtype, device: torch.device) -> None:
        self.scan = scan
        self._chosen = choose_kernel("mamba2", dtype, device)
        self._compute: Callable[[Mamba2, RequestStates, Tensor, Tensor], Tensor] = mamba2_reference
        if self._chosen == "native":
            self._compute = partial(launch_mamba2, native_library())
        elif self._chosen == "triton":
            from ...kernels.recurrent import mamba2_triton

            self._compute = mamba2_triton.launch_mamba2

    def __call__(self, x: Tensor, steps: Tensor, states: RequestStates) -> Tensor:
        """[T, I] of what the convolution gives, and of the steps of each head [T, H]."""
        return self._compute(self.scan, states, x, steps)

    def emit(self, program: Program, x: Slot, projected: Slot, first: int, width: int, y: Slot) -> None:
        """The same as an operation; steps are numbers from `first` on of rows of `width`."""
        if self._chosen != "native":
            raise NotNativeError("mamba2")
        place = {"x": x, "steps": projected, "y": y, "first": first, "stride": width}
        program.add(Kind.MAMBA2, Scan(scan=make_table(self.scan), **place))


@dataclass(eq=False)
class Mamba2Mixer(Mixer):
    """As Mamba2Spec says. `norms`: of runs of a token's numbers, one after the other."""

    spec: Mamba2Spec  # this rank's
    in_proj: Linear
    convolution: Convolution
    scan: Mamba2Scan
    norms: list[RMSNorm]
    out_proj: Linear

    def __call__(
        self,
        hidden: Tensor,
        angles: Angles | None,  # noqa: ARG002
        kv_cache: tuple[Tensor, Tensor],  # noqa: ARG002
        metadata: AttentionMetadata,
    ) -> Tensor:
        spec, states = self.spec, find_states(metadata)
        projected = self.in_proj(hidden)
        x = self.convolution(projected, states)
        y = self.scan(x, projected[:, spec.inner_size + spec.conv_size :], states)
        gate = projected[:, : spec.inner_size]
        native = choose_kernel("product", y.dtype, y.device) == "native"
        multiply = partial(launch_product, native_library()) if native else product_reference
        y, first = multiply(y, gate, "silu"), 0
        for norm in self.norms:
            norm.normalize_(y[:, first : first + norm.size])
            first += norm.size
        return self.out_proj(y)

    def emit_write(
        self,
        program: Program,
        x: Slot,
        angles: AngleSlots | None,  # noqa: ARG002
        layer: int,  # noqa: ARG002
    ) -> tuple[Slot, ...]:
        spec, width = self.spec, self.spec.projected_size
        projected, convolved = program.slot("mamba", width), program.slot("convolved", spec.conv_size)
        y = program.slot("scanned", spec.inner_size)
        self.in_proj.emit(program, x, projected)
        self.convolution.emit(program, projected, width, convolved)
        self.scan.emit(program, convolved, projected, spec.inner_size + spec.conv_size, width, y)
        product = Product(x=y, y=projected, size=spec.inner_size, stride=width, gate=GATES["silu"])
        program.add(Kind.PRODUCT, product)
        return (y,)

    def emit_attend(self, program: Program, slots: tuple[Slot, ...], y: Slot, layer: int) -> None:  # noqa: ARG002
        first = 0
        for norm in self.norms:
            norm.emit_in_place(program, slots[0], first, self.spec.inner_size)
            first += norm.size
        self.out_proj.emit(program, slots[0], y)
