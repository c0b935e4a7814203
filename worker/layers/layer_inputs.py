"""Inputs of each layer by token, beside the hidden states, and what a layer does after its two parts.

Legend: T tokens, L layers, I numbers of a layer's input.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...kernels.program.program import Add, Kind, Product, Program, Scale, Slot
from .embedding import Embedding
from .linear import Linear
from .norm import RMSNorm, Scaled

_NAME = "layer_inputs"


@dataclass(eq=False)
class LayerInputs:
    """[T, L * I]: (norm by I numbers of projection(embedding) * projection_scale, + tokens[id]) * scale."""

    tokens: Embedding
    projection: Linear
    projection_scale: float
    norm: RMSNorm
    scale: float

    def __call__(self, input_ids: Tensor, positions: Tensor, embedding: Tensor) -> Tensor:
        inputs = self.projection(embedding) * self.projection_scale
        self.norm.normalize_each_(inputs)
        return inputs.add_(self.tokens(input_ids, positions)).mul_(self.scale)

    def emit(self, program: Program, embedding: Slot) -> Slot:
        """The same as operations."""
        width = self.tokens.table.shape[1]
        inputs, tokens = program.slot(_NAME, width), program.slot("layer_input_tokens", width)
        self.projection.emit(program, embedding, inputs)
        program.add(Kind.SCALE, Scale(x=inputs, size=width, factor=self.projection_scale))
        self.norm.emit_in_place(program, inputs, 0, width, width // self.norm.size)
        self.tokens.emit(program, tokens)
        program.add(Kind.ADD, Add(x=tokens, residual=inputs, size=width))
        program.add(Kind.SCALE, Scale(x=inputs, size=width, factor=self.scale))
        return inputs


@dataclass(eq=False)
class InputGate:
    """norm(projection(act(gate(h)) * input)); the layer's input is the columns from `first` on."""

    gate: Linear  # with the activation
    projection: Linear
    norm: RMSNorm
    size: int
    first: int
    width: int

    def __call__(self, hidden: Tensor, inputs: Tensor) -> Tensor:
        gated = self.gate(hidden) * inputs[:, self.first : self.first + self.size]
        return self.norm(self.projection(gated))

    def emit(self, program: Program, x: Slot, y: Slot) -> None:
        """The same as operations."""
        gated, inputs = program.slot("layer_input_gated", self.size), program.slot(_NAME, self.width)
        self.gate.emit(program, x, gated)
        place = {"first": self.first, "size": self.size, "stride": self.width}
        program.add(Kind.PRODUCT, Product(x=gated, y=inputs, **place))
        self.projection.emit(program, gated, y)
        self.norm.emit(program, y, y)


@dataclass(eq=False)
class LayerEnd:
    """h += gate(h, the layer's input), then h *= scalar; where a layer has them."""

    gate: InputGate | None
    scalar: Scaled | None

    def __call__(self, delta: Tensor, residual: Tensor, inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        """As a layer's call: (what is to be added, the sum before it)."""
        if self.gate is not None and inputs is not None:
            residual = residual + delta
            delta = self.gate(residual, inputs)
        return (delta, residual) if self.scalar is None else (self.scalar(delta), self.scalar(residual))

    def emit(self, program: Program, delta: Slot, residual: Slot) -> None:
        """The same as operations."""
        if self.gate is not None:
            program.add(Kind.ADD, Add(x=delta, residual=residual, size=self.gate.norm.size))
            self.gate.emit(program, residual, delta)
        if self.scalar is not None:
            self.scalar.emit(program, delta, delta)
            self.scalar.emit(program, residual, residual)
