"""The rows of a trace: results [T, width] that layers of ours compute, each with the rows it is made of.

What stands between them is tried (trials.py): heads, their order and rotation are found whatever code they
are. What is not understood is no row; who needs it raises NotTracedError.
Legend: T tokens, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor

from ....ipc.spec.model_spec import AttentionSpec
from .trace import IDS, NUM_TOKENS, Node, NotTracedError, Ref
from .trials import ACTIVATIONS, Trials, Turn

_SAME = {
    *("view", "reshape", "contiguous", "clone", "to", "type_as", "type", "float", "bfloat16", "dropout"),
    *("squeeze", "unsqueeze", "flatten", "detach", "__getitem__"),
}
_ADDS = {"add", "__add__", "__iadd__", "add_", "__radd__"}
_SCALES = {"mul", "__mul__", "__imul__", "__rmul__"}


class Weight(NamedTuple):
    """Names of a weight and a bias. `is_turned`: stored [in, out]; `outputs`: which, in this order."""

    weight: str
    bias: str | None = None
    is_turned: bool = False
    outputs: Tensor | None = None


class AttentionCall(NamedTuple):
    """What a layer's attention computes of its input, beside the projection of its result."""

    layer: int
    spec: AttentionSpec
    qkv: tuple[Weight, ...]
    row_norms: tuple[tuple[str, Tensor], ...]  # of all heads of queries, of keys: the norm and its order
    head_norms: tuple[str, str, bool] | None  # of each head of queries, of keys; whether after the turn
    turn: Turn | None
    sinks: str | None


@dataclass(eq=False, slots=True)
class Row:
    """`kind` of the layer: embed (`weights` is the table), positions (`by`, made of them, is added), scale
    (by `number`), sum, norm (`name` is transformers' module, or '' for a layer norm by torch: `weights`, and
    `number`, its epsilon), linear (`name` is an activation behind it), gated (the activation `name` of the
    first of two projections, times the second), attended, and attention, which is that and a projection.
    """

    kind: str
    ref: Ref
    width: int
    inputs: tuple[Row, ...] = ()
    weights: tuple[Weight, ...] = ()
    name: str = ""
    number: float = 0.0
    by: Ref | None = None
    call: AttentionCall | None = None


class _Heads(NamedTuple):
    """How queries, keys or values come of a row."""

    row: Row
    places: Tensor  # [H, D] of the row's width
    scale: float
    norm: str | None
    is_norm_after: bool
    turn: Turn | None


class RowReader:
    """Reads all rows of a trace, in its order."""

    def __init__(self, trials: Trials, layers: Sequence[AttentionSpec], dtype: torch.dtype) -> None:
        self._trials, self._layers, self._dtype = trials, layers, dtype
        self._nodes, self._shapes = trials.trace.nodes, trials.trace.shapes
        self._rows: dict[Ref, Row] = trials.known
        self._attended: dict[Ref, Row] = {}
        self._num_calls = 0
        for index, node in enumerate(self._nodes):
            self._read(Ref(index), node)

    def find_logits(self, logits: Ref) -> tuple[Row, Weight, float, float | None]:
        """(hidden states, the projection of them, a factor and a soft cap on what that gives)."""
        source = self._trials.find_source(logits)
        row = None if source is None else self._rows.get(source)
        while row is not None and row.kind == "scale":
            (row,) = row.inputs
        if row is None or not _is_plain(row):
            raise NotTracedError("logits that are no linear layer's")
        factor, cap = self._trials.find_cap(row.ref, logits)
        if row.weights[0].bias is not None and factor != 1:
            raise NotTracedError("logits with a bias that are scaled")
        return row.inputs[0], row.weights[0], factor, cap

    def _read(self, ref: Ref, node: Node) -> None:
        args: Any = node.args
        is_call = node.kind == "call"
        first = args[0] if args and isinstance(args[0], Ref) else None
        x = None if first is None or first not in self._rows else self._rows[first]
        if node.kind == "norm" or (is_call and node.name == "layer_norm"):
            if x is not None and self._shapes[args[0]][-1] == x.width:
                self._read_norm(ref, node, x)
        elif node.kind == "attend":
            self._read_attention(ref, *args)
        elif node.kind == "act" or node.name in ACTIVATIONS:
            name = self._trials.find_activation(ref)
            if x is not None and name is not None and _is_plain(x):
                self._add(Row("linear", ref, x.width, x.inputs, x.weights, name))
        elif node.name == "linear":
            bias = args[2] if len(args) > 2 else (node.kwargs or {}).get("bias")
            self._read_linear(ref, first, args[1], bias, is_turned=False)
        elif node.name == "addmm":
            self._read_linear(ref, args[1], args[2], args[0], is_turned=True)
        elif node.name == "embedding" and first is not None and self._trials.find_stem(first) == Ref(IDS):
            self._add(Row("embed", ref, self._shapes[ref][-1], (), (Weight(self._name(args[1])),)))
        elif node.name in _ADDS | _SCALES and len(args) == 2 and not node.kwargs:
            read = self._read_sum if node.name in _ADDS else self._read_product
            read(ref, *args)
        elif node.name in ("div", "__truediv__") and x is not None:
            self._read_scale(ref, x, args[1], is_divisor=True)
        elif is_call and node.name in _SAME and first is not None:
            self._read_same(ref, first, args[1:])

    def _add(self, row: Row) -> None:
        if self._trials.trace.dtypes[row.ref] is not self._dtype:
            raise NotTracedError("numbers of another type")
        self._rows[row.ref] = row

    def _find_row(self, ref: Any) -> Row | None:
        """The row of a result that has its width."""
        row = self._rows.get(ref) if isinstance(ref, Ref) else None
        return row if row is not None and self._shapes[ref][-1] == row.width else None

    def _read_same(self, ref: Ref, before: Ref, others: tuple[Any, ...]) -> None:
        """The same numbers in the same order; a result of attention becomes a row."""
        shapes, dtypes = self._shapes, self._trials.trace.dtypes
        if ref not in shapes or Node("", "", others).refs:
            return
        if dtypes[ref] != dtypes[before] or shapes[ref].numel() != shapes[before].numel():
            return
        for rows in (self._attended, self._rows):
            row = rows.get(before)
            if row is not None and shapes[ref][-1] == row.width:
                self._rows[ref] = row
            elif row is not None and rows is self._attended:
                rows[ref] = row

    def _read_norm(self, ref: Ref, node: Node, x: Row) -> None:
        if node.kind == "norm":
            self._add(Row("norm", ref, x.width, (x,), name=node.name))
            return
        named = dict(zip(("", "shape", "weight", "bias", "eps"), node.args, strict=False)) | (
            node.kwargs or {}
        )
        weight, bias = named.get("weight"), named.get("bias")
        weights = (Weight(self._name(weight), bias and self._name(bias)),) if weight is not None else ()
        self._add(Row("norm", ref, x.width, (x,), weights, number=named.get("eps", 1e-5)))

    def _read_linear(self, ref: Ref, source: Any, weight: Any, bias: Any, *, is_turned: bool) -> None:
        x, width = self._find_row(source), self._shapes[ref][-1]
        if x is None:
            return
        weights = (Weight(self._name(weight), None if bias is None else self._name(bias), is_turned),)
        if x.kind == "attended":
            self._add(Row("attention", ref, width, x.inputs, weights, call=x.call))
        else:
            self._add(Row("linear", ref, width, (x,), weights))

    def _read_sum(self, ref: Ref, a: Any, b: Any) -> None:
        x, y = self._find_row(a), self._find_row(b)
        if x is not None and y is not None and x.width == y.width:
            self._add(Row("sum", ref, x.width, (x, y)))
        for row, other in ((x, b), (y, a)):
            if row is not None and isinstance(other, Ref) and self._trials.is_by_position(other):
                self._add(Row("positions", ref, row.width, (row,), by=other))

    def _read_product(self, ref: Ref, a: Any, b: Any) -> None:
        if all(isinstance(each, Ref) and self._trials.find_sources(each) for each in (a, b)):
            self._read_gated(ref, a, b)
            return
        for ref_of_row, other in ((a, b), (b, a)):
            row = self._rows.get(ref_of_row) if isinstance(ref_of_row, Ref) else None
            if row is not None:
                self._read_scale(ref, row, other, is_divisor=False)

    def _read_scale(self, ref: Ref, row: Row, by: Any, *, is_divisor: bool) -> None:
        number = self._trials.compute_number(by)
        if number is not None:
            self._add(Row("scale", ref, row.width, (row,), number=1 / number if is_divisor else number))

    def _read_gated(self, ref: Ref, a: Ref, b: Ref) -> None:
        for gate, up in ((a, b), (b, a)):
            activated, up_source = self._trials.find_source(gate), self._trials.find_source(up)
            name = None if activated is None else self._trials.find_activation(activated)
            if activated is None or name is None or (activated != gate and gate not in self._rows):
                continue
            before = self._nodes[activated.node].args[0]
            sources = self._trials.find_source(before), up_source
            rows = [self._rows[each] for each in sources if each is not None and each in self._rows]
            if len(rows) != 2 or not all(map(_is_plain, rows)) or rows[0].inputs != rows[1].inputs:
                continue
            weights = list[Weight]()
            for row, part in zip(rows, (before, up), strict=True):
                factors, index = self._trials.find_choice(row.ref, part)
                if (factors != 1).any():
                    return
                weights.append(pick(row.weights, index))
            self._add(Row("gated", ref, self._shapes[ref][-1], rows[0].inputs, tuple(weights), name))
            return

    def _name(self, ref: Any) -> str:
        node = self._nodes[ref.node] if isinstance(ref, Ref) else None
        if node is None or node.kind != "constant":
            raise NotTracedError("a weight that is computed")
        return node.name

    # -- attention

    def _read_attention(self, ref: Ref, query: Ref, key: Ref, value: Ref, sinks: Ref | None) -> None:
        layer, self._num_calls = self._num_calls, self._num_calls + 1
        spec = self._layers[layer]
        counts = spec.num_heads, spec.num_kv_heads, spec.num_kv_heads
        for each, heads in zip((query, key, value), counts, strict=True):
            if tuple(self._shapes[each])[1:] != (heads, NUM_TOKENS, spec.head_size):
                raise NotTracedError("heads narrower than the cache's")
        q, k, v = (self._find_heads(each) for each in (query, key, value))
        if v.scale != 1 or v.turn is not None or v.norm is not None or not _is_plain(v.row):
            raise NotTracedError("values that are more than projected")
        if q.turn is not k.turn or (q.norm is None) != (k.norm is None):
            raise NotTracedError("queries and keys that differ")
        if q.turn is None and q.scale * k.scale != 1:
            spec = replace(spec, scale=(spec.scale or spec.head_size**-0.5) * q.scale * k.scale)
        inputs, qkv, row_norms = list[Row](), list[Weight](), list[tuple[str, Tensor]]()
        for heads in (q, k, v):
            index = (heads.places if heads.turn is None else heads.places[:, heads.turn.order]).flatten()
            row = heads.row
            if row.kind == "norm":  # of all heads together
                row_norms.append((row.name, index))
                (row,) = row.inputs
                if len(index) != heads.row.width:
                    raise NotTracedError("a norm of more than the heads")
            if not _is_plain(row):
                raise NotTracedError("heads that are no linear layer's")
            inputs += row.inputs
            qkv.append(pick(row.weights, index))
        if any(each is not inputs[0] for each in inputs) or len(row_norms) == 1:
            raise NotTracedError("heads of several inputs")
        norms = None if q.norm is None or k.norm is None else (q.norm, k.norm, q.is_norm_after)
        name = None if sinks is None else self._name(sinks)
        call = AttentionCall(layer, spec, tuple(qkv), tuple(row_norms), norms, q.turn, name)
        self._attended[ref] = Row("attended", ref, spec.query_size, (inputs[0],), call=call)

    def _find_heads(self, ref: Ref) -> _Heads:
        """A row's numbers as heads, with a norm of each or without, before or after they turn."""
        trials, shape = self._trials, self._shapes[ref]
        source, middle, norm = trials.find_source(ref), ref, None
        if source is not None and source not in self._rows and self._nodes[source.node].kind == "norm":
            norm = source
            middle = self._nodes[norm.node].args[0]
            source = trials.find_source(middle)
        row = None if source is None else self._rows.get(source)
        while row is not None and row.kind == "scale":
            (row,) = row.inputs
        if row is None:
            raise NotTracedError("heads of several sources, or behind what is no row")
        source = row.ref
        factors, index = trials.find_choice(source, middle)
        turning = (source, middle, index) if trials.find_turning(source, middle) else None
        is_norm_after = norm is not None and turning is not None
        if norm is not None:
            norm_factors, places = trials.find_choice(norm, ref)
            factors, index = factors[places] * norm_factors, index[places]
            if trials.find_turning(norm, ref):
                if turning is not None:
                    raise NotTracedError("heads that turn twice")
                turning, is_norm_after = (norm, ref, places), False
        turn = None
        if turning is not None:
            start, end, places = turning
            turn = trials.find_turn(start, end, places.view(shape[1], shape[3]))
        elif (factors != factors[0]).any():
            raise NotTracedError("heads that are multiplied by several numbers")
        name = None if norm is None else self._nodes[norm.node].name
        index = index.view(shape[1], shape[3])
        return _Heads(row, index, factors[0].item(), name, is_norm_after, turn)


def _is_plain(row: Row) -> bool:
    """Whether it is a linear layer's, without an activation."""
    return row.kind == "linear" and not row.name


def pick(weights: tuple[Weight, ...], outputs: Tensor) -> Weight:
    """Some outputs of a linear layer."""
    if len(weights) != 1 or weights[0].outputs is not None:
        raise NotTracedError("a choice of several layers' outputs")
    return weights[0]._replace(outputs=outputs)
