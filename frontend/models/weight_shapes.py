"""Holds the shapes that weight files declare against the spec, before anything of the weights is read.

A tensor of another shape would be met by the worker too, but after all that comes before it.
What is listed here is what worker/models/builder.py takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from ...ipc.errors import ModelError
from ...ipc.spec.linear_shapes import LinearShape, list_layer_linears, list_linears
from ...ipc.spec.model_spec import (
    AttentionSpec,
    DenseSpec,
    ExpertsSpec,
    ModelSpec,
    list_stored_names,
    rename_stored,
)
from ...ipc.spec.weight_format import LM_HEAD

Shape = tuple[int, ...]


def check_shapes(spec: ModelSpec, shapes: Mapping[str, Shape], folder: Path) -> None:
    """ModelError names the first tensor that is missing, or has a shape of another model.

    `shapes`: of all tensors of the folder's files, by their names there. Layers in a format of their own
    (`spec.weight_formats`) and files beside the model's are left to the worker.
    """
    stored = {rename_stored(name, spec.stored_prefixes): shape for name, shape in shapes.items()}
    stacked = frozenset(_check_stacks(spec, stored))
    in_layers = {linear.name for together in list_layer_linears(spec) for linear in together}
    linears = [linear for together in list_linears(spec) for linear in together]
    for linear in (LinearShape(spec.embedding.tokens, spec.vocab_size, spec.hidden_size), *linears):
        format, name = spec.weight_formats.find(linear.name), f"{linear.name}.weight"
        if linear.name in stacked or (format is not None and format.layout is not None):
            continue
        wanted = linear.num_out, linear.num_in
        is_transposed = spec.transposed_linears and linear.name in in_layers
        _check(name, _find(name, spec, stored, folder), wanted[::-1] if is_transposed else wanted)
    for name, wanted in _list_others(spec, stored):
        shape = _find(name, spec, stored, folder)
        if len(wanted) != 1 or math.prod(shape) != math.prod(wanted) or any(size != 1 for size in shape[:-1]):
            _check(name, shape, wanted)  # one number may be a scalar, a row of numbers [1, count]


def _find(name: str, spec: ModelSpec, stored: Mapping[str, Shape], folder: Path) -> Shape:
    for each in list_stored_names(name, spec.optional_prefix):
        if each in stored:
            return stored[each]
    raise ModelError("model", str(folder), f"its weights must hold the tensor {name!r}")


def _check_stacks(spec: ModelSpec, stored: Mapping[str, Shape]) -> Iterator[str]:
    """The layers of experts that are in one tensor with others, whose shapes are checked."""
    for index, layer in enumerate(spec.layers):
        ffn, prefix = layer.ffn, f"{spec.layer_prefix.format(index)}."
        if not isinstance(ffn, ExpertsSpec) or ffn.stack is None:
            continue
        count, width, hidden = ffn.num_experts, ffn.intermediate_size, spec.hidden_size
        stack = ffn.stack
        for name, parts, (num_out, num_in) in (
            (prefix + stack.gate_up, (ffn.gate, ffn.up), (2 * width, hidden)),
            (prefix + stack.down, (ffn.down,), (hidden, width)),
        ):
            if name in stored:
                is_transposed = stack.is_transposed
                if is_transposed is None:
                    is_transposed = stored[name] != (count, num_out, num_in)
                wanted = (num_in, num_out) if is_transposed else (num_out, num_in)
                _check(name, stored[name], (count, *wanted))
                yield from (prefix + part.format(expert) for part in parts for expert in range(count))


def _list_others(spec: ModelSpec, stored: Mapping[str, Shape]) -> Iterator[tuple[str, Shape]]:
    """Names and shapes of all that is neither a linear layer nor the table of tokens."""
    names, inputs, hidden = spec.embedding, spec.per_layer_inputs, spec.hidden_size
    if names.positions is not None:
        yield f"{names.positions}.weight", (spec.max_position_embeddings + names.position_offset, hidden)
    if names.types is not None:
        yield f"{names.types}.weight", (names.num_types, hidden)
    if inputs is not None:
        yield f"{inputs.tokens}.weight", (inputs.num_rows, spec.layer_inputs_size)
        yield f"{inputs.norm}.weight", (inputs.size,)
    if (bias := spec.relative_bias) is not None:
        yield f"{bias.name}.weight", (bias.num_buckets, spec.layers[0].attention.num_heads)
    yield from _list_norms(spec, "", names.norm)
    for index, layer in enumerate(spec.layers):
        prefix = f"{spec.layer_prefix.format(index)}."
        yield from _list_attention(prefix, layer.attention, hidden)
        if layer.recurrent is not None:
            yield from ((prefix + name, shape) for name, shape in layer.recurrent.list_others(hidden))
        norms = [layer.attention_norm, layer.ffn_norm]
        if layer.residual_scale is None and not (layer.is_parallel or layer.norms_sum):
            norms += [layer.attention_out_norm, layer.ffn_out_norm]
        yield from _list_norms(spec, prefix, *norms)
        if isinstance(layer.ffn, ExpertsSpec):
            yield from _list_experts(prefix, layer.ffn, hidden, stored)
        else:
            yield from _list_dense(prefix, layer.ffn, hidden)
        if layer.layer_input is not None:
            yield f"{prefix}{layer.layer_input.norm}.weight", (hidden,)
        if layer.scalar is not None:
            yield prefix + layer.scalar, (1,)
    yield from _list_norms(spec, "", spec.norm)
    if spec.has_logits and spec.lm_head_bias:
        yield f"{LM_HEAD}.bias", (spec.vocab_size,)


def _list_norms(spec: ModelSpec, prefix: str, *names: str | None) -> Iterator[tuple[str, Shape]]:
    """Of hidden states, of the model's kind."""
    is_layer = spec.norm_kind == "layer"
    parts = ["weight"] * (spec.norm_has_weight or not is_layer) + ["bias"] * (spec.norm_bias and is_layer)
    for name in names:
        yield from ((f"{prefix}{name}.{part}", (spec.hidden_size,)) for part in parts if name is not None)


def _list_attention(prefix: str, spec: AttentionSpec, hidden: int) -> Iterator[tuple[str, Shape]]:
    if not spec.num_heads:
        return
    if spec.o_bias:
        yield f"{prefix}{spec.out}.bias", (hidden,)
    if (latent := spec.latent) is not None:
        if latent.q_rank is not None:
            yield f"{prefix}{latent.q_a_norm}.weight", (latent.q_rank,)
        yield f"{prefix}{latent.kv_a_norm}.weight", (latent.rank,)
        sizes = {latent.kv_a: latent.size} | ({} if latent.q_rank is None else {latent.q_a: latent.q_rank})
        yield from ((f"{prefix}{name}.bias", (size,)) for name, size in sizes.items() if latent.bias)
        return
    for name, size in zip(spec.qkv, spec.qkv_sizes, strict=True) if spec.qkv_bias else ():
        yield f"{prefix}{name}.bias", (size,)
    if spec.qk_norm is not None and spec.qk_norm_has_weight:
        is_each = spec.qk_norm == "each_head"
        yield f"{prefix}{spec.q_norm}.weight", (spec.head_size if is_each else spec.query_size,)
        if spec.kv_layer is None:
            yield f"{prefix}{spec.k_norm}.weight", (spec.head_size if is_each else spec.kv_size,)
    if spec.sinks is not None:
        yield prefix + spec.sinks, (spec.num_heads,)


def _list_dense(prefix: str, spec: DenseSpec, hidden: int) -> Iterator[tuple[str, Shape]]:
    if spec.bias:
        width, names = spec.intermediate_size, (spec.gate, spec.up) if spec.is_gated else (spec.up,)
        if spec.fused is not None:
            width, names = 2 * width, (spec.gate,)
        yield from ((f"{prefix}{name}.bias", (width,)) for name in names)
    if spec.has_down_bias:
        yield f"{prefix}{spec.down}.bias", (hidden,)
    for part in ("alpha_p", "alpha_n", "beta", "eps") if spec.xielu is not None else ():
        yield f"{prefix}{spec.xielu}.{part}", (1,)


def _list_experts(
    prefix: str, spec: ExpertsSpec, hidden: int, stored: Mapping[str, Shape]
) -> Iterator[tuple[str, Shape]]:
    count, width = spec.num_experts, spec.intermediate_size
    yield f"{prefix}{spec.router}.weight", (count, hidden)
    if spec.router_bias:
        yield f"{prefix}{spec.router}.bias", (count,)
    yield from ((prefix + name, (count,)) for name in (spec.correction, spec.expert_scales) if name)
    if spec.bias and spec.stack is not None and f"{prefix}{spec.stack.gate_up}_bias" in stored:
        yield f"{prefix}{spec.stack.gate_up}_bias", (count, 2 * width)
        yield f"{prefix}{spec.stack.down}_bias", (count, hidden)
    elif spec.bias:
        for expert in range(count):
            for name, size in ((spec.gate, width), (spec.up, width), (spec.down, hidden)):
                yield f"{prefix}{name.format(expert)}.bias", (size,)
    if spec.shared is not None:
        yield from _list_dense(prefix, spec.shared, hidden)
    if spec.shared_gate is not None:
        yield f"{prefix}{spec.shared_gate}.weight", (1, hidden)
    if (norms := spec.branch_norms) is not None:
        for name in (norms.experts, norms.experts_out, norms.shared, norms.shared_out):
            yield f"{prefix}{name}.weight", (hidden,)
        yield prefix + norms.router_scale, (hidden,)


def _check(name: str, shape: Shape, wanted: Shape) -> None:
    if shape != wanted:
        raise ModelError(name, list(shape), f"the shape {list(wanted)}, which config.json calls for")
