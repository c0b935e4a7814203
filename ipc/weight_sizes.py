"""What a model's weights take in memory, by its spec and its layers' formats, before any is read."""

from __future__ import annotations

from .linear_shapes import LinearShape, list_layer_linears
from .model_spec import DTYPE_SIZE_BYTES, Dtype, ModelSpec
from .weight_format import LM_HEAD, WeightFormats


def count_weight_bytes(spec: ModelSpec, formats: WeightFormats, dtype: Dtype, num_ranks: int = 1) -> int:
    """A lower bound: tables and linear layers, without norms, biases and what kernels pad.

    Of one of `num_ranks` ranks `spec` is its own (`ModelSpec.for_rank`), in which the vocabulary is whole.
    """
    hidden, size = spec.hidden_size, DTYPE_SIZE_BYTES[dtype]
    rows = spec.vocab_size // num_ranks
    total = rows * hidden * size
    shapes = [shape for together in list_layer_linears(spec) for shape in together]
    head = formats.find(LM_HEAD)  # no checkpoint stores one of its own beside a tied table
    is_shared = spec.tie_word_embeddings and (head is None or head.layout is not None)
    if spec.has_logits and not is_shared:
        shapes.append(LinearShape(LM_HEAD, rows, hidden))
    for shape in shapes:
        format, num_out, num_in = formats.find(shape.name), shape.num_out, shape.num_in
        total += num_out * num_in * size if format is None else format.count_bytes(num_out, num_in)
    return total
