"""What a model's weights take in memory, by its spec and its layers' formats, before any is read."""

from __future__ import annotations

import msgspec

from .linear_shapes import LinearShape, list_layer_linears
from .model_spec import DTYPE_SIZE_BYTES, Dtype, ModelSpec
from .weight_format import LM_HEAD, WeightFormat, WeightFormats


def count_weight_bytes(spec: ModelSpec, formats: WeightFormats, dtype: Dtype, num_ranks: int = 1) -> int:
    """A lower bound: tables and linear layers, without norms, biases and what kernels pad.

    Of one of `num_ranks` ranks `spec` is its own (`ModelSpec.for_rank`), in which the vocabulary is whole.
    """
    hidden, size = spec.hidden_size, DTYPE_SIZE_BYTES[dtype]
    rows = spec.vocab_size // num_ranks
    total = rows * hidden * size
    stacks = list(list_layer_linears(spec))
    head = formats.find(LM_HEAD)  # no checkpoint stores one of its own beside a tied table
    is_shared = spec.tie_word_embeddings and (head is None or head.layout is not None)
    if spec.has_logits and not is_shared:
        stacks.append((LinearShape(LM_HEAD, rows, hidden),))
    for together in stacks:
        format = _stack_formats([formats.find(shape.name) for shape in together])
        for shape in together:
            num_out, num_in = shape.num_out, shape.num_in
            total += num_out * num_in * size if format is None else format.count_bytes(num_out, num_in)
    return total


def _stack_formats(formats: list[WeightFormat | None]) -> WeightFormat | None:
    """What layers that are multiplied together take the form of: the widest that one of them needs."""
    first, *others = found = [format for format in formats if format is not None] or [None]
    if first is None or all(other == first for other in others):
        return first
    integers = [format for format in found if format is not None]
    sizes = [format.group_size for format in integers if format.group_size]
    bits = {format.bits for format in integers}
    return msgspec.structs.replace(
        first,
        bits=8 if 8 in bits else 4,
        group_size=min(sizes, default=0),
        has_offsets=len(bits) > 1 or any(format.has_offsets for format in integers),
    )
