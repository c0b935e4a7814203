"""The attention layer: projections around a backend that knows the paged cache."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...ipc.spec.model_spec import AttentionSpec
from ...kernels.attention.paged_attention import NO_WINDOW, default_scale, pack_position_bias
from ...kernels.program.program import (
    Attend,
    EncoderAttend,
    Kind,
    NotNativeError,
    Program,
    Rotate,
    ScaleRows,
    Slot,
)
from ..attention import AttentionBackend, QKNorm
from ..attention.metadata import AttentionMetadata
from ..attention.native_attention import NativeAttention
from .gate import Gate
from .linear import Linear
from .mixer import Mixer
from .norm import RMSNorm
from .rotary import Angles, AngleSlots


@dataclass(eq=False)
class Attention(Mixer):
    """Self-attention of one layer.

    `head_norms` are of each query and key head by itself, `all_heads_norms` of all queries and all keys of a
    token; a model has one of them or none. `position_bias` is what `pack_position_bias` makes, None where
    scores have none; `sinks` are float32 [H], None where there are none; `value_norm` is of each head of
    values by itself; `gate` multiplies what the heads give.
    """

    spec: AttentionSpec
    qkv_proj: Linear
    o_proj: Linear
    head_norms: QKNorm | None
    all_heads_norms: tuple[RMSNorm, ...]
    backend: AttentionBackend
    position_bias: Tensor | None = None
    sinks: Tensor | None = None
    value_norm: RMSNorm | None = None
    gate: Gate | None = None

    @property
    def backends(self) -> tuple[AttentionBackend, ...]:
        return (self.backend,)

    @property
    def writes(self) -> bool:
        return self.spec.kv_layer is None

    def __call__(
        self,
        hidden: Tensor,
        angles: Angles | None,
        kv_cache: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
    ) -> Tensor:
        metadata = metadata.for_group(self.spec.kv_group)
        rows, first = self.qkv_proj(hidden), 0
        qkv = rows if self.gate is None else rows[:, : self.spec.qkv_size]
        for norm in self.all_heads_norms:
            norm.normalize_(qkv[:, first : first + norm.size])
            first += norm.size
        if angles is not None and angles.query_scale is not None:  # rotation leaves the factor as it is
            qkv[:, : self.spec.query_size] *= angles.query_scale.to(qkv.dtype).unsqueeze(1)
        if self.value_norm is not None:
            self.value_norm.normalize_each_(qkv[:, -self.spec.kv_size :])
        own = kv_cache
        if self.spec.kv_layer is not None:  # of its own it has no heads to write
            own = kv_cache[0][:, :0], kv_cache[1][:, :0]
        query = self.backend.rotate_and_write(qkv, angles and angles[:2], self.head_norms, own, metadata)
        extra = self.position_bias, self.sinks
        attended = self.backend.attend(query, kv_cache, metadata, self.spec, *extra)
        return self.o_proj(
            attended if self.gate is None else self.gate(attended, rows[:, self.spec.qkv_size :])
        )

    def emit_write(
        self, program: Program, x: Slot, angles: AngleSlots | None, layer: int
    ) -> tuple[Slot, ...]:
        if not isinstance(self.backend, NativeAttention):
            raise NotNativeError(type(self.backend).__name__)
        spec, first, width = self.spec, 0, self.spec.projected_size
        if spec.is_causal:
            # Rows that are kept are as wide as their slot, so each width has its own.
            qkv = program.slot(f"qkv{width}", width)
        else:  # layers use two in turn: other parts of a step may still read the one before
            qkv = program.slot(f"qkv_{layer % 2}", width, is_whole=True)
        self.qkv_proj.emit(program, x, qkv)
        for norm in self.all_heads_norms:
            norm.emit_in_place(program, qkv, first, width)
            first += norm.size
        if not spec.is_causal and angles is None and self.head_norms is None:
            return (qkv,)
        if self.value_norm is not None:
            place = spec.qkv_size - spec.kv_size, width, spec.num_kv_heads
            self.value_norm.emit_in_place(program, qkv, *place)
        operation = Rotate(qkv=qkv, layer=layer, writes=spec.keeps_kv, stride=width, **_heads_of(spec))
        if spec.kv_layer is not None:
            operation.num_kv_heads = 0
        if angles is not None:
            operation.cos, operation.sin, table = angles
            if table is not None:
                factors = ScaleRows(table=table.data_ptr(), x=qkv, size=spec.query_size, stride=width)
                program.add(Kind.SCALE_ROWS, factors)
        if self.head_norms is not None:
            query_norm, key_norm, operation.eps, operation.norms_after = self.head_norms
            operation.query_norm, operation.key_norm = query_norm.data_ptr(), key_norm.data_ptr()
        program.add(Kind.ROTATE, operation)
        return (qkv,)

    def emit_attend(self, program: Program, slots: tuple[Slot, ...], y: Slot, layer: int) -> None:
        spec = self.spec
        attended = program.slot("attended", spec.query_size)
        operation = Attend(layer=layer) if spec.is_causal else EncoderAttend()
        for name, value in {"qkv": slots[0], "y": attended, **_heads_of(spec)}.items():
            setattr(operation, name, value)
        operation.window = NO_WINDOW if spec.window is None else spec.window
        if self.position_bias is not None:
            operation.bias, operation.reach = self.position_bias.data_ptr(), self.position_bias.shape[1] // 2
        if self.sinks is not None:
            operation.sinks = self.sinks.data_ptr()
        if isinstance(operation, Attend):
            operation.value_size, operation.stride = spec.head_size, spec.projected_size
        operation.scale = spec.scale or default_scale(spec.head_size)
        operation.soft_cap = spec.soft_cap or 0.0
        program.add(Kind.ATTEND if spec.is_causal else Kind.ENCODER_ATTEND, operation)
        if self.gate is not None:
            self.gate.emit(program, attended, spec.query_size, slots[0], spec.qkv_size, spec.projected_size)
        self.o_proj.emit(program, attended, y)


def _heads_of(spec: AttentionSpec) -> dict[str, int]:
    return {"num_heads": spec.num_heads, "num_kv_heads": spec.num_kv_heads, "head_size": spec.head_size}


def make_position_bias(table: Tensor, max_distance: int, max_model_len: int) -> Tensor:
    """float32 [H, 2 L - 1] by key less query, as kernels take it, from a table [buckets, H].

    The buckets are T5's for attention both ways (arXiv 1910.10683, 2.1): half of them for keys after the
    query, small distances one by one, larger ones by their logarithm up to `max_distance`.
    """
    num_buckets = table.shape[0] // 2
    num_exact = num_buckets // 2
    distances = torch.arange(1 - max_model_len, max_model_len)
    sizes = distances.abs()
    growth = torch.log(sizes.clamp(min=1).float() / num_exact) / math.log(max_distance / num_exact)
    large = num_exact + (growth * (num_buckets - num_exact)).long()
    buckets = torch.where(sizes < num_exact, sizes, large.clamp(max=num_buckets - 1))
    buckets += (distances > 0) * num_buckets
    return pack_position_bias(table.float()[buckets.to(table.device)].t().contiguous())
