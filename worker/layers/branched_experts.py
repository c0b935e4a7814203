"""The feed-forward part of a layer whose dense network and experts are normed apart (Gemma 4)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...kernels.program import program as ops
from ...kernels.program.program import Kind, Program, Slot
from .collectives import AllReduce
from .feed_forward import MLP, Experts, PlainMLP
from .norm import RMSNorm


@dataclass(eq=False)
class BranchedExperts:
    """A dense network and experts side by side, each with a norm of the layer's sum before it and one behind.

    The router reads the sum by a norm of its own. With `all_reduce` each part's results are those of a rank.
    """

    experts: Experts
    dense: MLP | PlainMLP
    router_norm: RMSNorm
    norms: tuple[RMSNorm, RMSNorm]  # of what the dense network is given, and what experts are
    out_norms: tuple[RMSNorm, RMSNorm]
    all_reduce: AllReduce | None = None

    @property
    def is_capturable(self) -> bool:
        """As of FeedForward."""
        return self.experts.is_capturable and self.all_reduce is None

    def __call__(self, hidden: Tensor) -> Tensor:
        dense = self.dense(self.norms[0](hidden))
        routed = self.experts.run_routed(self.norms[1](hidden), self.router_norm(hidden))
        if self.all_reduce is not None:
            dense, routed = self.all_reduce(dense), self.all_reduce(routed)
        return self.out_norms[0](dense) + self.out_norms[1](routed)

    def emit(self, program: Program, x: Slot, y: Slot) -> None:
        """As FeedForward.emit."""
        size = self.router_norm.size
        normed, routed = program.slot("normed", size), program.slot("shared", size)
        router_input = self.router_norm.emit(program, x, program.slot("router_input", size))
        self.experts.emit_routed(program, self.norms[1].emit(program, x, normed), router_input, routed)
        self.dense.emit(program, self.norms[0].emit(program, x, normed), y)
        for part, norm in ((y, self.out_norms[0]), (routed, self.out_norms[1])):
            if self.all_reduce is not None:
                self.all_reduce.emit(program, part)
            norm.emit(program, part, part)
        program.add(Kind.ADD, ops.Add(x=routed, residual=y, size=size))
