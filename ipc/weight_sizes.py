"""What a model's weights take in memory, by its spec and its layers' formats, before any is read."""

from __future__ import annotations

from collections.abc import Iterator

from .model_spec import DTYPE_SIZE_BYTES, AttentionSpec, DenseSpec, Dtype, ExpertsSpec, ModelSpec
from .weight_format import LM_HEAD, WeightFormats

Shape = tuple[str, int, int]  # of a linear layer: its tensors' name without ".weight", outputs, inputs


def count_weight_bytes(spec: ModelSpec, formats: WeightFormats, dtype: Dtype, num_ranks: int = 1) -> int:
    """A lower bound: tables and linear layers, without norms, biases and what kernels pad.

    Of one of `num_ranks` ranks `spec` is its own (`ModelSpec.for_rank`), in which the vocabulary is whole.
    """
    hidden, size = spec.hidden_size, DTYPE_SIZE_BYTES[dtype]
    rows = spec.vocab_size // num_ranks
    total = rows * hidden * size
    shapes = list(_list_layers(spec))
    if spec.has_logits and not (spec.tie_word_embeddings and formats.find(LM_HEAD) is None):
        shapes.append((LM_HEAD, rows, hidden))
    for name, num_out, num_in in shapes:
        format = formats.find(name)
        total += num_out * num_in * size if format is None else format.count_bytes(num_out, num_in)
    return total


def _list_layers(spec: ModelSpec) -> Iterator[Shape]:
    for index, layer in enumerate(spec.layers):
        prefix = spec.layer_prefix.format(index)
        parts = _list_attention(layer.attention, spec.hidden_size), _list_ffn(layer.ffn, spec.hidden_size)
        for name, num_out, num_in in (shape for part in parts for shape in part):
            yield f"{prefix}.{name}", num_out, num_in


def _list_attention(attention: AttentionSpec, hidden: int) -> Iterator[Shape]:
    sizes = (attention.query_size, attention.kv_size, attention.kv_size)
    if len(attention.qkv) == 1:
        sizes = (attention.qkv_size,)
    for name, size in zip(attention.qkv, sizes, strict=True):
        yield name, size, hidden
    yield attention.out, hidden, attention.query_size


def _list_ffn(ffn: DenseSpec | ExpertsSpec, hidden: int) -> Iterator[Shape]:
    width = ffn.intermediate_size
    if isinstance(ffn, ExpertsSpec):
        for expert in range(ffn.num_experts):
            for name in (ffn.gate, ffn.up):
                yield name.format(expert), width, hidden
            yield ffn.down.format(expert), hidden, width
        return
    if ffn.is_gated and ffn.fused is not None:
        yield ffn.gate, 2 * width, hidden
    else:
        for name in (ffn.gate, ffn.up) if ffn.is_gated else (ffn.up,):
            yield name, width, hidden
    yield ffn.down, hidden, width
