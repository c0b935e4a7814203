"""Latent attention (DeepSeek V2, arXiv 2405.04434, 2.1), always absorbed: heads share the cached latents.

A query's part without rotation is multiplied by W_uk into the latent's space, where it meets the latents as
they are; sums of latents are multiplied by W_uv. That is one arithmetic for prompts and decodes, so bits do
not depend on how a prompt was cut. Legend: T tokens, H heads.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from ...ipc.spec.model_spec import AttentionSpec, LatentSpec
from ...kernels.attention.paged_attention import NO_WINDOW
from ...kernels.choice import native_library
from ...kernels.linear.head_products import launch_multiply_heads
from ...kernels.program.program import (
    Attend,
    Kind,
    MultiplyHeads,
    NotNativeError,
    Program,
    RotateLatent,
    ScaleRows,
    Slot,
)
from ..attention import AttentionBackend
from ..attention.metadata import AttentionMetadata
from ..attention.native_attention import NativeAttention
from .feed_forward import make_tables
from .linear import Linear
from .mixer import Mixer
from .norm import RMSNorm
from .rotary import Angles, AngleSlots


class HeadProducts:
    """A plain linear layer for each head, all of one shape."""

    def __init__(self, layers: list[Linear]) -> None:
        self._layers, self._tables = layers, make_tables(layers)
        self._stack: Tensor | None = None
        if not layers[0].is_exact:  # one product of all heads, whose bits may depend on the rows
            self._stack = torch.stack([layer.weight for layer in layers]).transpose(1, 2)
            for layer, part in zip(layers, self._stack, strict=True):
                layer.weight = part.t()

    @property
    def size_bytes(self) -> int:
        """Bytes of the weights."""
        return sum(layer.size_bytes for layer in self._layers)

    def __call__(self, x: Tensor, y: Tensor) -> None:
        """Writes y [T, H, out] of x [T, H, in]; both may be parts of longer rows."""
        if self._tables is not None:
            launch_multiply_heads(native_library(), x, self._tables, y)
        elif self._stack is not None:
            y.copy_(torch.bmm(x.transpose(0, 1), self._stack).transpose(0, 1))
        else:
            for head, layer in enumerate(self._layers):
                y[:, head] = layer(x[:, head].contiguous())

    def emit(self, program: Program, x: Slot, x_step: int, y: Slot, y_step: int) -> None:
        """The same as an operation; steps are numbers from head to head. Raises NotNativeError."""
        if self._tables is None:
            raise NotNativeError(type(self._layers[0]).__name__)
        heads = len(self._layers)
        program.add(
            Kind.MULTIPLY_HEADS,
            MultiplyHeads(
                layers=ctypes.addressof(self._tables),
                num_heads=heads,
                **{"x": x, "x_step": x_step, "x_stride": heads * x_step},
                **{"y": y, "y_step": y_step, "y_stride": heads * y_step},
            ),
        )


@dataclass(eq=False)
class LatentAttention(Mixer):
    """Self-attention of one layer, called as an Attention. `q_a`: what queries are projections of."""

    spec: AttentionSpec
    latent: LatentSpec
    q_a: tuple[Linear, RMSNorm] | None
    q_proj: Linear
    kv_a_proj: Linear
    kv_norm: RMSNorm
    absorb: HeadProducts
    expand: HeadProducts
    o_proj: Linear
    backend: AttentionBackend

    @property
    def backends(self) -> tuple[AttentionBackend, ...]:
        return (self.backend,)

    def __call__(
        self,
        hidden: Tensor,
        angles: Angles | None,
        kv_cache: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
    ) -> Tensor:
        latent, heads = self.latent, (self.spec.num_heads, -1)
        query = self.q_proj(hidden if self.q_a is None else self.q_a[1](self.q_a[0](hidden)))
        if angles is not None and angles.query_scale is not None:
            query *= angles.query_scale.to(query.dtype).unsqueeze(1)
        query, compressed = query.unflatten(1, heads), self.kv_a_proj(hidden)
        self.kv_norm.normalize_(compressed[:, : latent.rank])
        rows = self.backend.write_latent(
            query, compressed, latent.rank, angles and angles[:2], kv_cache, metadata
        )
        self.absorb(query[..., : latent.nope_size], rows[..., : latent.rank])
        attended = self.backend.attend(rows, kv_cache, metadata, self.spec).unflatten(1, heads)
        out = attended.new_empty((len(hidden), self.spec.num_heads, latent.value_size))
        self.expand(attended, out)
        return self.o_proj(out.flatten(1))

    def emit_write(
        self, program: Program, x: Slot, angles: AngleSlots | None, layer: int
    ) -> tuple[Slot, ...]:
        if not isinstance(self.backend, NativeAttention):
            raise NotNativeError(type(self.backend).__name__)
        latent, num_heads, from_ = self.latent, self.spec.num_heads, x
        size = num_heads * latent.head_size
        query, compressed = program.slot("query", size), program.slot("latent", latent.size)
        rows = program.slot("qkv", self.spec.query_size)
        if self.q_a is not None:
            first, norm = self.q_a
            from_ = program.slot("query_latent", norm.size)
            first.emit(program, x, from_)
            norm.emit(program, from_, from_)
        self.q_proj.emit(program, from_, query)
        self.kv_a_proj.emit(program, x, compressed)
        self.kv_norm.emit_in_place(program, compressed, 0, latent.size)
        rotate = RotateLatent(query=query, y=rows, latent=compressed, layer=layer, num_heads=num_heads)
        rotate.nope, rotate.rope, rotate.rank = latent.nope_size, latent.rope_size, latent.rank
        if angles is not None:
            rotate.cos, rotate.sin, table = angles
            if table is not None:
                program.add(
                    Kind.SCALE_ROWS, ScaleRows(table=table.data_ptr(), x=query, size=size, stride=size)
                )
        program.add(Kind.ROTATE_LATENT, rotate)
        self.absorb.emit(program, query, latent.head_size, rows, self.spec.head_size)
        return (rows,)

    def emit_attend(self, program: Program, slots: tuple[Slot, ...], y: Slot, layer: int) -> None:
        spec, latent = self.spec, self.latent
        attended = program.slot("attended", spec.num_heads * latent.rank)
        out = program.slot("expanded", spec.out_size)
        operation = Attend(qkv=slots[0], y=attended, layer=layer, num_heads=spec.num_heads, num_kv_heads=1)
        operation.head_size, operation.value_size = spec.head_size, latent.rank
        operation.stride, operation.scale = spec.query_size, spec.scale
        operation.window = NO_WINDOW if spec.window is None else spec.window
        program.add(Kind.ATTEND, operation)
        self.expand.emit(program, attended, latent.rank, out, latent.value_size)
        self.o_proj.emit(program, out, y)
