"""The formats of a GGUF model's linear layers, by the types of their tensors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

from ...ipc.gguf_tensor import GgmlType, GgufTensor
from ...ipc.model_spec import ModelSpec
from ...ipc.weight_format import WeightFormat, WeightFormats

# bits, numbers of a group, and whether a group has an offset (worker/quantization/gguf_blocks.py).
_FORMS: dict[GgmlType, tuple[Literal[4, 8], int, bool]] = {
    "Q8_0": (8, 32, False),
    "Q4_0": (4, 32, False),
    "Q4_1": (4, 32, True),
    "Q5_0": (8, 32, False),
    "Q5_1": (8, 32, True),
    "Q4_K": (4, 32, True),
    "Q5_K": (8, 32, True),
    "Q6_K": (8, 16, False),
}
# Projections of the same inputs are one layer in memory, which has a format or is plain.
_SAME_INPUTS = re.compile(r"\b(?:[qkv]|gate|up)_proj$|\bw[13]$")


def make_formats(tensors: Sequence[GgufTensor], spec: ModelSpec) -> WeightFormats:
    """Of all matrices; the most common one is the default. A tied table has its own under its own name."""
    formats = {
        name: _make_format(tensor.type)
        for tensor in tensors
        if tensor.name.endswith(".weight") and len(tensor.shape) > 1
        for name in _list_names(tensor)
    }
    plain = {_SAME_INPUTS.sub("", name) for name, format in formats.items() if format is None}
    formats = {
        name: None if _SAME_INPUTS.sub("", name) in plain else format for name, format in formats.items()
    }
    if not spec.tie_word_embeddings:  # the table is looked up, and not multiplied with
        formats.pop(spec.embedding.tokens, None)
    counts = Counter(formats.values())
    default = max(counts, key=lambda format: counts[format], default=None)
    exceptions = {name: format for name, format in formats.items() if format != default}
    tied = formats.get(spec.embedding.tokens)
    if tied is not None:
        exceptions[spec.embedding.tokens] = tied
    return WeightFormats(default=default, exceptions=exceptions)


def _make_format(type_: GgmlType) -> WeightFormat | None:
    if type_ not in _FORMS:
        return None
    bits, group_size, has_offsets = _FORMS[type_]
    return WeightFormat(bits=bits, group_size=group_size, has_offsets=has_offsets, layout="gguf")


def _list_names(tensor: GgufTensor) -> Iterable[str]:
    name = tensor.name.removesuffix(".weight")
    return map(name.format, range(tensor.shape[0])) if "{}" in name else (name,)
