"""Layers of Mamba-2 (kernels/recurrent/mamba2.py). Legend: T tokens, I numbers of all heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...ipc.spec.recurrent_spec import Mamba2Spec
from ...kernels.program.program import Kind, Program, Scan, Slot
from ...kernels.recurrent.mamba2 import Mamba2, launch_mamba2, make_table, mamba2_reference
from ..attention.metadata import AttentionMetadata
from .gate import Gate
from .linear import Linear
from .mixer import Mixer
from .norm import RMSNorm
from .recurrent import Convolution, Forms, Recurrence, find_states
from .rotary import Angles, AngleSlots


def _load_triton() -> Callable[..., Tensor]:
    from ...kernels.recurrent import mamba2_triton

    return mamba2_triton.launch_mamba2


_FORMS = Forms("mamba2", mamba2_reference, launch_mamba2, _load_triton)


class Mamba2Scan(Recurrence):
    """The recurrence (kernels/recurrent/mamba2.py)."""

    numbers: Mamba2

    def __init__(self, scan: Mamba2, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(_FORMS, scan, dtype, device)

    def _add(self, program: Program, **places: int) -> None:
        program.add(Kind.MAMBA2, Scan(scan=make_table(self.numbers), **places))


@dataclass(eq=False)
class Mamba2Mixer(Mixer):
    """As Mamba2Spec says. `norms`: of runs of a token's numbers, one after the other."""

    spec: Mamba2Spec  # this rank's
    in_proj: Linear
    convolution: Convolution
    scan: Mamba2Scan
    gate: Gate
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
        x = self.convolution(states, projected)
        y = self.scan(states, x, projected[:, spec.inner_size + spec.conv_size :])
        y, first = self.gate(y, projected[:, : spec.inner_size]), 0
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
        self.convolution.emit(program, x=projected, y=convolved, stride=width)
        first = spec.inner_size + spec.conv_size
        self.scan.emit(program, x=convolved, steps=projected, y=y, first=first, stride=width)
        self.gate.emit(program, y, spec.inner_size, projected, 0, width)
        return (y,)

    def emit_attend(self, program: Program, slots: tuple[Slot, ...], y: Slot, layer: int) -> None:  # noqa: ARG002
        first = 0
        for norm in self.norms:
            norm.emit_in_place(program, slots[0], first, self.spec.inner_size)
            first += norm.size
        self.out_proj.emit(program, slots[0], y)
