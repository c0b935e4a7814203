"""The linear layers of a spec by their tensors' names: formats of weights and their sizes go by these."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from .config import ModelConfig
from .model_spec import (
    DTYPE_SIZE_BYTES,
    NO_FFN,
    AttentionSpec,
    DenseSpec,
    Dtype,
    ExpertsSpec,
    ModelSpec,
    RopeConfig,
    find_ropes,
)
from .weight_format import LM_HEAD, WeightFormat, WeightFormats


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A weight [num_out, num_in] and its name, without ".weight"."""

    name: str
    num_out: int
    num_in: int


def list_linears(spec: ModelSpec) -> Iterator[tuple[LinearShape, ...]]:
    """All of them, those that are multiplied together in one tuple. Routers of experts are none.

    A projection to logits that is tied to the embedding's table has no weight of its own, and is none.
    """
    yield from list_layer_linears(spec)
    if spec.has_logits and not spec.tie_word_embeddings:
        yield (LinearShape(LM_HEAD, spec.vocab_size, spec.hidden_size),)


def list_layer_linears(spec: ModelSpec) -> Iterator[tuple[LinearShape, ...]]:
    """As `list_linears`, without the projection to logits."""
    hidden = spec.hidden_size
    if spec.generic is not None:
        for num_out, num_in, count in spec.generic.linears:
            yield from [(LinearShape("", num_out, num_in),)] * count
        return
    for index, layer in enumerate(spec.layers, spec.stage.first_layer):
        prefix = f"{spec.layer_prefix.format(index)}."
        if layer.attention.num_heads:
            yield from _list_attention(prefix, layer.attention, hidden)
        for name, num_out, num_in in layer.recurrent.list_linears(hidden) if layer.recurrent else ():
            yield (LinearShape(prefix + name, num_out, num_in),)
        if layer.ffn == NO_FFN:
            pass
        elif isinstance(layer.ffn, DenseSpec):
            yield from _list_dense(prefix, layer.ffn, hidden)
        else:
            yield from _list_experts(prefix, layer.ffn, hidden)
        if (part := layer.layer_input) is not None and (inputs := spec.per_layer_inputs) is not None:
            yield (LinearShape(prefix + part.gate, inputs.size, hidden),)
            yield (LinearShape(prefix + part.projection, hidden, inputs.size),)
    if spec.per_layer_inputs is not None:
        yield (LinearShape(spec.per_layer_inputs.projection, spec.layer_inputs_size, hidden),)


def _list_attention(prefix: str, spec: AttentionSpec, hidden: int) -> Iterator[tuple[LinearShape, ...]]:
    if spec.latent is not None:
        for name, num_out, num_in in spec.latent.list_linears(spec.num_heads, hidden):
            yield (LinearShape(prefix + name, num_out, num_in),)
        yield (LinearShape(prefix + spec.out, hidden, spec.out_size),)
        return
    pairs = zip(spec.qkv, spec.qkv_sizes, strict=True)
    yield tuple(LinearShape(prefix + name, size, hidden) for name, size in pairs)
    yield (LinearShape(prefix + spec.out, hidden, spec.query_size),)


def _list_dense(prefix: str, spec: DenseSpec, hidden: int) -> Iterator[tuple[LinearShape, ...]]:
    width = spec.intermediate_size
    if spec.fused is not None:
        yield (LinearShape(prefix + spec.gate, 2 * width, hidden),)
    else:
        names = (spec.gate, spec.up) if spec.is_gated else (spec.up,)
        yield tuple(LinearShape(prefix + name, width, hidden) for name in names)
    yield (LinearShape(prefix + spec.down, hidden, width),)


def _list_experts(prefix: str, spec: ExpertsSpec, hidden: int) -> Iterator[tuple[LinearShape, ...]]:
    width = spec.intermediate_size
    for expert in range(spec.num_experts):
        gate, up, down = (prefix + name.format(expert) for name in (spec.gate, spec.up, spec.down))
        yield LinearShape(gate, width, hidden), LinearShape(up, width, hidden)
        yield (LinearShape(down, hidden, width),)
    if spec.shared is not None:
        yield from _list_dense(prefix, spec.shared, hidden)


def count_model_bytes(model: ModelConfig, num_ranks: int = 1, packs_table: bool = False) -> int:
    """What an engine's ledger has as weights, but for norms, biases and what kernels pad: a lower bound.

    Of one of `num_ranks` ranks `model` is its own (`EngineConfig.for_rank`). `packs_table`: a CPU's kernels
    make a packed copy of a table that is tied, to compute logits with.
    """
    spec, names = model.spec, model.spec.embedding
    num_rows = names.num_types if spec.stage.is_first else 0
    if names.positions is not None and spec.stage.is_first:
        num_rows += spec.max_position_embeddings + names.position_offset
    return (
        count_weight_bytes(spec, model.weight_formats, model.dtype, num_ranks, packs_table)
        + num_rows * spec.hidden_size * DTYPE_SIZE_BYTES[model.dtype]
        + sum(_count_angle_bytes(spec, *rope, model.max_model_len) for rope in find_ropes(spec))
    )


def _count_angle_bytes(spec: ModelSpec, rope: RopeConfig, head_size: int, max_model_len: int) -> int:
    """The bytes of a rotation's tables, by position, or for the dynamic type by a sequence's length."""
    num_rows = 2 * max_model_len
    if rope.type == "dynamic":
        num_rows = max(max_model_len - spec.max_position_embeddings, 0) + 1
    return num_rows * (head_size // 2) * DTYPE_SIZE_BYTES["float32"]


def count_weight_bytes(
    spec: ModelSpec, formats: WeightFormats, dtype: Dtype, num_ranks: int = 1, packs_table: bool = False
) -> int:
    """The part of `count_model_bytes` that is tables and linear layers; the vocabulary of `spec` is whole."""
    hidden, size = spec.hidden_size, DTYPE_SIZE_BYTES[dtype]
    rows = spec.vocab_size // num_ranks
    total = size * (rows * hidden if spec.generic is None else spec.generic.num_others)
    if spec.per_layer_inputs is not None:
        total += size * spec.per_layer_inputs.num_rows // num_ranks * spec.layer_inputs_size
    stacks = list(list_layer_linears(spec))
    # Of a tied table that is stored narrow (GGUF) the head is a copy in that form, of another what is made
    # of it while it is read: no checkpoint stores a head of its own beside one.
    head = formats.find(LM_HEAD)
    is_shared = spec.tie_word_embeddings and (head is None or head.layout is not None)
    tied = formats.exceptions.get(spec.embedding.tokens) if spec.tie_word_embeddings else None
    if spec.has_logits and (tied is not None or not is_shared):
        stacks.append((LinearShape(LM_HEAD if tied is None else spec.embedding.tokens, rows, hidden),))
    elif spec.has_logits and packs_table:
        total += rows * hidden * size
    for together in stacks:
        format = _stack_formats([formats.find(shape.name) for shape in together])
        for shape in together:
            num_out, num_in = shape.num_out, shape.num_in
            total += num_out * num_in * size if format is None else format.count_bytes(num_out, num_in)
    return total


def _stack_formats(formats: list[WeightFormat | None]) -> WeightFormat | None:
    """What layers that are multiplied together take the form of: the widest that one of them needs."""
    first, *others = narrow = [format for format in formats if format is not None] or [None]
    if first is None or all(other == first for other in others):
        return first
    integers = [format for format in narrow if format is not None]
    sizes = [format.group_size for format in integers if format.group_size]
    bits = {format.bits for format in integers}
    return msgspec.structs.replace(
        first,
        bits=8 if 8 in bits else 4,
        group_size=min(sizes, default=0),
        has_offsets=len(bits) > 1 or any(format.has_offsets for format in integers),
    )
