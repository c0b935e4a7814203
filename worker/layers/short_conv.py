"""Layers that convolve in attention's place (LFM2), and what recurrent layers share.

Legend: T tokens, C channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ...kernels.choice import choose_kernel, native_library
from ...kernels.program.program import Convolve, Kind, NotNativeError, Program, Slot
from ...kernels.recurrent.causal_conv import (
    CausalConv,
    causal_conv_reference,
    launch_causal_conv,
    make_table,
)
from ...kernels.recurrent.states import RequestStates
from ..attention.metadata import AttentionMetadata
from .linear import Linear
from .mixer import Mixer
from .rotary import Angles, AngleSlots


class Convolution:
    """A causal convolution (kernels/recurrent/causal_conv.py) in the form that the device has."""

    def __init__(self, conv: CausalConv, dtype: torch.dtype, device: torch.device) -> None:
        self.conv = conv
        self._chosen = choose_kernel("causal_conv", dtype, device)
        self._compute: Callable[[CausalConv, RequestStates, Tensor], Tensor] = causal_conv_reference
        if self._chosen == "native":
            self._compute = partial(launch_causal_conv, native_library())
        elif self._chosen == "triton":
            from ...kernels.recurrent import causal_conv_triton

            self._compute = causal_conv_triton.launch_causal_conv

    @property
    def is_exact(self) -> bool:
        """Whether a request's bits depend on itself alone."""
        return self._chosen != "torch"

    @property
    def size_bytes(self) -> int:
        """Of its weight and bias."""
        return self.conv.weight.nbytes + (0 if self.conv.bias is None else self.conv.bias.nbytes)

    def __call__(self, x: Tensor, states: RequestStates) -> Tensor:
        """[T, C] of rows x."""
        return self._compute(self.conv, states, x)

    def emit(self, program: Program, x: Slot, width: int, y: Slot) -> None:
        """The same as an operation; rows of x have `width` numbers. Raises NotNativeError."""
        if self._chosen != "native":
            raise NotNativeError("causal_conv")
        program.add(Kind.CONVOLVE, Convolve(conv=make_table(self.conv), x=x, y=y, stride=width))


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
        return self.out_proj(self.convolution(self.in_proj(hidden), find_states(metadata)))

    def emit_write(
        self,
        program: Program,
        x: Slot,
        angles: AngleSlots | None,  # noqa: ARG002
        layer: int,  # noqa: ARG002
    ) -> tuple[Slot, ...]:
        size = self.convolution.conv.weight.shape[1]
        rows, y = program.slot("short_conv", 3 * size), program.slot("convolved", size)
        self.in_proj.emit(program, x, rows)
        self.convolution.emit(program, rows, 3 * size, y)
        return (y,)

    def emit_attend(self, program: Program, slots: tuple[Slot, ...], y: Slot, layer: int) -> None:  # noqa: ARG002
        self.out_proj.emit(program, slots[0], y)


def find_states(metadata: AttentionMetadata) -> RequestStates:
    """The states of a step's requests, as recurrent operations take them."""
    states = metadata.states
    assert states is not None
    return RequestStates(
        states.states,
        states.slots,
        metadata.query_starts,
        metadata.seq_lens,
        states.save_starts,
        states.save_tokens,
        states.save_slots,
    )
