"""Layers of the gated delta rule in attention's place (Qwen3-Next, Qwen3.5).

Legend: T tokens, H value heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.program.program import AdvanceDelta, Kind, Program, Slot
from ...kernels.recurrent.delta_rule import (
    DeltaRule,
    delta_rule_reference,
    launch_delta_rule,
    make_table,
)
from ..attention.metadata import AttentionMetadata
from .gate import Gate
from .linear import Linear
from .mixer import Mixer
from .norm import RMSNorm
from .recurrent import Convolution, Forms, Recurrence, find_states
from .rotary import Angles, AngleSlots


def _load_triton() -> Callable[..., Tensor]:
    from ...kernels.recurrent import delta_rule_triton

    return delta_rule_triton.launch_delta_rule


_FORMS = Forms("delta_rule", delta_rule_reference, launch_delta_rule, _load_triton)


class DeltaRecurrence(Recurrence):
    """The gated delta rule (kernels/recurrent/delta_rule.py)."""

    numbers: DeltaRule

    def __init__(self, rule: DeltaRule, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(_FORMS, rule, dtype, device)

    def _add(self, program: Program, **places: int) -> None:
        program.add(Kind.DELTA_RULE, AdvanceDelta(rule=make_table(self.numbers), **places))


@dataclass(eq=False)
class DeltaNet(Mixer):
    """As DeltaNetSpec says. `in_proj` gives the convolution's channels, then z; `gates` beta, then decays."""

    in_proj: Linear
    gates: Linear
    convolution: Convolution
    recurrence: DeltaRecurrence
    norm: RMSNorm
    gate: Gate
    out_proj: Linear

    @property
    def _sizes(self) -> tuple[int, int, int]:
        """Channels, numbers of all values, value heads."""
        rule = self.recurrence.numbers
        heads = rule.num_value_heads
        return self.convolution.num_channels, heads * rule.value_size, heads

    def __call__(
        self,
        hidden: Tensor,
        angles: Angles | None,  # noqa: ARG002
        kv_cache: tuple[Tensor, Tensor],  # noqa: ARG002
        metadata: AttentionMetadata,
    ) -> Tensor:
        channels, _, heads = self._sizes
        rows, gates, states = self.in_proj(hidden), self.gates(hidden), find_states(metadata)
        y = self.recurrence(states, self.convolution(states, rows), gates[:, heads:], gates[:, :heads])
        self.norm.normalize_each_(y)
        return self.out_proj(self.gate(y, rows[:, channels:]))

    def emit_write(
        self,
        program: Program,
        x: Slot,
        angles: AngleSlots | None,  # noqa: ARG002
        layer: int,  # noqa: ARG002
    ) -> tuple[Slot, ...]:
        channels, size, heads = self._sizes
        width = channels + size
        rows, gates = program.slot(f"delta{width}", width), program.slot("delta_gates", 2 * heads)
        convolved, y = program.slot("convolved", channels), program.slot(f"delta_out{size}", size)
        self.in_proj.emit(program, x, rows)
        self.gates.emit(program, x, gates)
        self.convolution.emit(program, x=rows, y=convolved, stride=width)
        self.recurrence.emit(
            program,
            **{"qkv": convolved, "qkv_stride": channels, "y": y},
            **{"decay": gates, "decay_first": heads, "decay_stride": 2 * heads},
            **{"beta": gates, "beta_stride": 2 * heads},
        )
        return y, rows

    def emit_attend(self, program: Program, slots: tuple[Slot, ...], y: Slot, layer: int) -> None:  # noqa: ARG002
        channels, size, heads = self._sizes
        out, rows = slots
        self.norm.emit_in_place(program, out, 0, size, heads)
        self.gate.emit(program, out, size, rows, channels, channels + size)
        self.out_proj.emit(program, out, y)
