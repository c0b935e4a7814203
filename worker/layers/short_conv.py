"""Layers that convolve in attention's place (LFM2)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...kernels.program.program import Program, Slot
from ..attention.metadata import AttentionMetadata
from .linear import Linear
from .mixer import Mixer
from .recurrent import Convolution, find_states
from .rotary import Angles, AngleSlots


@dataclass(eq=False)
class ShortConv(Mixer):
    """As ShortConvSpec says."""

    in_proj: Linear
    convolution: Convolution
    out_proj: Linear

    def __call__(
        self,
        hidden: Tensor,
        angles: Angles | None,  # noqa: ARG002
        kv_cache: tuple[Tensor, Tensor],  # noqa: ARG002
        metadata: AttentionMetadata,
    ) -> Tensor:
        return self.out_proj(self.convolution(find_states(metadata), self.in_proj(hidden)))

    def emit_write(
        self,
        program: Program,
        x: Slot,
        angles: AngleSlots | None,  # noqa: ARG002
        layer: int,  # noqa: ARG002
    ) -> tuple[Slot, ...]:
        size = self.convolution.num_channels
        rows, y = program.slot("short_conv", 3 * size), program.slot("convolved", size)
        self.in_proj.emit(program, x, rows)
        self.convolution.emit(program, x=rows, y=y, stride=3 * size)
        return (y,)

    def emit_attend(self, program: Program, slots: tuple[Slot, ...], y: Slot, layer: int) -> None:  # noqa: ARG002
        self.out_proj.emit(program, slots[0], y)
