"""Holds the shapes that weight files declare against the spec, before anything of the weights is read.

A tensor of another shape would be met by the worker too, but after all that comes before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from ...ipc.errors import ModelError
from ...ipc.spec.linear_shapes import LinearShape, list_layer_linears, list_linears
from ...ipc.spec.model_spec import ExpertsSpec, ModelSpec, list_stored_names, rename_stored

Shape = tuple[int, ...]


def check_shapes(spec: ModelSpec, shapes: Mapping[str, Shape], folder: Path) -> None:
    """ModelError names the first table or linear layer that is missing, or has a shape of another model.

    `shapes`: of all tensors of the folder's files, by their names there. Norms, biases and layers in a format
    of their own (`spec.weight_formats`) are left to the worker.
    """
    stored = {rename_stored(name, spec.stored_prefixes): shape for name, shape in shapes.items()}
    stacked = frozenset(_check_stacks(spec, stored))
    in_layers = {linear.name for together in list_layer_linears(spec) for linear in together}
    linears = [linear for together in list_linears(spec) for linear in together]
    for linear in (LinearShape(spec.embedding.tokens, spec.vocab_size, spec.hidden_size), *linears):
        format, name = spec.weight_formats.find(linear.name), f"{linear.name}.weight"
        if linear.name in stacked or (format is not None and format.layout is not None):
            continue
        shape = next(
            (stored[each] for each in list_stored_names(name, spec.optional_prefix) if each in stored), None
        )
        if shape is None:
            raise ModelError("model", str(folder), f"its weights must hold the tensor {name!r}")
        wanted = linear.num_out, linear.num_in
        _check(name, shape, wanted[::-1] if spec.transposed_linears and linear.name in in_layers else wanted)


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


def _check(name: str, shape: Shape, wanted: Shape) -> None:
    if shape != wanted:
        raise ModelError(name, list(shape), f"the shape {list(wanted)}, which config.json calls for")
