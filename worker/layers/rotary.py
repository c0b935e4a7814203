"""Rotary position embedding: angles of every position, with the scalings that published models use.

The inverse frequencies follow transformers' `modeling_rope_utils` (default, linear, dynamic NTK, llama3,
yarn, longrope), because a model is only right with the angles it was trained on. Rotation itself is a kernel:
what is not rotated of a head has the angle 0, and its places are chosen by `find_head_order`.
Legend: T tokens, D head size.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ipc.spec.model_spec import RopeConfig
from ...kernels.program import program as ops
from ...kernels.program.program import Kind, Program, Slot


class Angles(NamedTuple):
    """cos and sin of each token's angles, float32 [T, D / 2], and what its queries are multiplied by [T]."""

    cos: Tensor
    sin: Tensor
    query_scale: Tensor | None = None


class AngleSlots(NamedTuple):
    """The same in a program, where the query's factors are a table by position."""

    cos: Slot
    sin: Slot
    query_scale: Tensor | None = None


class RotaryEmbedding:
    """cos and sin of each token's angles, from tables made once so that they never depend on the step."""

    def __init__(
        self,
        rope: RopeConfig,
        head_size: int,
        max_position_embeddings: int,
        max_model_len: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`dtype` is that of the queries, which factors on them are rounded to."""
        self._query_scale = None if rope.query_scale_beta is None else _scale_queries(rope, max_model_len)
        if self._query_scale is not None:
            self._query_scale = self._query_scale.to(dtype).float().to(device)
        self._is_dynamic = rope.type == "dynamic"
        self._trained_len = max_position_embeddings
        self._tables: tuple[Tensor, ...]
        size = rope.rotated_size or head_size
        unrotated = (0, (head_size - size) // 2)
        if self._is_dynamic:
            lengths = torch.arange(max_position_embeddings, max(max_model_len, max_position_embeddings) + 1)
            inv_freq = compute_dynamic_frequencies(rope, size, max_position_embeddings, lengths)
            self._tables = (F.pad(inv_freq, unrotated).to(device),)
        else:
            inv_freq, attention_factor = compute_inverse_frequencies(rope, size, max_model_len)
            angles = torch.arange(max_model_len, dtype=torch.float32).unsqueeze(1) * inv_freq
            cos = F.pad(angles.cos() * attention_factor, unrotated, value=1.0)
            sin = F.pad(angles.sin() * attention_factor, unrotated)
            self._tables = cos.to(device), sin.to(device)

    @property
    def size_bytes(self) -> int:
        """The bytes of both tables."""
        return sum(table.nbytes for table in self._tables)

    def __call__(self, positions: Tensor, rope_lengths: Tensor | None) -> Angles:
        """For int64 positions [T] (all below max_model_len).

        `rope_lengths` int64 [T] (up to max_model_len) counts for the dynamic type, which needs it.
        """
        scale = None if self._query_scale is None else self._query_scale.index_select(0, positions)
        if not self._is_dynamic:
            cos, sin = self._tables
            return Angles(cos.index_select(0, positions), sin.index_select(0, positions), scale)
        assert rope_lengths is not None
        inv_freq = self._tables[0].index_select(0, (rope_lengths - self._trained_len).clamp_(min=0))
        angles = positions.float().unsqueeze(1) * inv_freq
        return Angles(angles.cos(), angles.sin(), scale)

    def emit(self, program: Program, index: int = 0) -> AngleSlots:
        """The same as an operation: the slots of cos and sin, other ones for each `index` of a model's ropes.

        Of a model that has a dynamic one, the angles of all come with each step.
        """
        half = self._tables[0].shape[1]
        cos, sin = (program.slot(f"{name}{index}", half, torch.float32) for name in ("cos", "sin"))
        operation = ops.Angles(cos=cos, sin=sin, half=half, rope=index)
        if not self._is_dynamic:
            operation.cos_table, operation.sin_table = (table.data_ptr() for table in self._tables)
        program.add(Kind.ANGLES, operation)
        return AngleSlots(cos, sin, self._query_scale)


class RotaryTables(RotaryEmbedding):
    """Of angles whose cos and sin, float32 [L, D / 2] each, are known already."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:  # pyright: ignore[reportMissingSuperCall]
        self._query_scale, self._is_dynamic, self._tables = None, False, (cos, sin)


def _scale_queries(rope: RopeConfig, max_model_len: int) -> Tensor:
    """float32 [max_model_len], as Llama 4 scales what stands beyond the trained length."""
    assert rope.query_scale_beta is not None
    assert rope.original_max_position_embeddings is not None
    positions = torch.arange(max_model_len) + rope.query_scale_offset
    times = positions // rope.original_max_position_embeddings
    return 1 + rope.query_scale_beta * torch.log(1 + times.float())


def compute_dynamic_frequencies(
    rope: RopeConfig, head_size: int, trained_len: int, lengths: Tensor
) -> Tensor:
    """float32 [len(lengths), D / 2]: NTK-aware scaling, whose base grows past the trained length.

    `lengths` is int64, at least the trained length each.
    """
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
    grown = rope.factor * lengths / trained_len - (rope.factor - 1)
    base = rope.theta * grown ** (head_size / (head_size - 2))
    return 1.0 / base.unsqueeze(1) ** exponents


def compute_inverse_frequencies(rope: RopeConfig, head_size: int, max_model_len: int) -> tuple[Tensor, float]:
    """(float32 [D / 2] on the CPU, factor on cos and sin) of a type whose angles a sequence does not change.

    `max_model_len` is the longest sequence that there can be, which decides between longrope's two sets.
    """
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
    inv_freq = 1.0 / rope.theta**exponents
    if rope.type == "default":
        return inv_freq, 1.0
    if rope.type == "linear":
        return inv_freq / rope.factor, 1.0
    if rope.type == "proportional":
        is_turning = torch.arange(head_size // 2) < int(rope.turning_share * head_size // 2)
        return torch.where(is_turning, inv_freq / rope.factor, 0.0), 1.0
    if rope.type == "llama3":
        return _scale_llama3(rope, inv_freq), 1.0
    if rope.type == "yarn":
        return _scale_yarn(rope, head_size), _yarn_attention_factor(rope)
    if rope.type == "longrope":
        assert rope.original_max_position_embeddings is not None
        is_long = max_model_len > rope.original_max_position_embeddings
        divisors = torch.tensor(rope.long_factors if is_long else rope.short_factors)
        return 1.0 / (divisors * rope.theta**exponents), rope.attention_factor or 1.0
    raise AssertionError(f"the angles of rope type {rope.type} depend on the sequence length")


def _scale_llama3(rope: RopeConfig, inv_freq: Tensor) -> Tensor:
    """Long wavelengths are stretched by the factor, short ones kept, those between blended (Llama 3.1)."""
    assert rope.original_max_position_embeddings is not None
    trained = rope.original_max_position_embeddings
    wavelength = 2 * math.pi / inv_freq
    longest, shortest = trained / rope.low_freq_factor, trained / rope.high_freq_factor
    smooth = (trained / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - smooth) * inv_freq / rope.factor + smooth * inv_freq
    scaled = torch.where(wavelength > longest, inv_freq / rope.factor, inv_freq)
    is_between = (wavelength >= shortest) & (wavelength <= longest)
    return torch.where(is_between, blended, scaled)


def _scale_yarn(rope: RopeConfig, head_size: int) -> Tensor:
    """Blend of interpolated and kept frequencies by their turns in the trained length (2309.00071)."""
    assert rope.original_max_position_embeddings is not None
    trained = rope.original_max_position_embeddings

    def dimension_of(turns: float) -> float:
        return head_size * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    if low == high:
        high += 0.001  # the ramp's width is a divisor
    ramp = ((torch.arange(head_size // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    frequencies = rope.theta ** (torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)
    kept, interpolated = 1.0 / frequencies, 1.0 / (rope.factor * frequencies)
    keep = 1 - ramp
    return interpolated * (1 - keep) + kept * keep


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _yarn_mscale(rope.factor, rope.mscale) / _yarn_mscale(rope.factor, rope.mscale_all_dim)
    return _yarn_mscale(rope.factor, 1.0)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
