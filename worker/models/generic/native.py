"""A trace as a native program: the operations of kernels/program in place of all of transformers' code.

What lies between a linear layer and attention (heads, their order, rotation) is not read but tried: its
results for chosen numbers say which of a layer's outputs become which of a head's, and which pairs turn by
which angles. The same for what lies between linear layers of a gated network, and behind the last one.
Legend: T tokens, H heads, D head size, L longest sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from ....ipc.spec.model_spec import AttentionSpec, ModelSpec
from ....kernels.program import program as ops
from ....kernels.program.program import OUT, Add, AddRows, Embed, Kind, NotNativeError, Program, Scale, Slot
from ...attention import AttentionBackend, QKNorm
from ...attention.metadata import AttentionMetadata, KVCaches
from ...attention.native_attention import NativeAttention
from ...layers.attention import Attention
from ...layers.feed_forward import GatedActivation
from ...layers.linear import Linear
from ...layers.logits import LogitsHead
from ...layers.norm import LayerNorm, RMSNorm, Scaled
from ...layers.rotary import AngleSlots
from ..model import Model
from ..native_forward import NativeForward, make_native_forward
from .layers import MakeLinear, find_activation, make_norm
from .trace import NUM_TOKENS, NotTracedError, Ref, Trace

_IDS, _POSITIONS = Ref(0), Ref(1)
_SAME = {
    *("view", "reshape", "contiguous", "clone", "to", "type_as", "type", "float", "bfloat16", "dropout"),
    *("squeeze", "unsqueeze", "flatten", "detach", "__getitem__"),
}
_ADDS, _SCALES = (
    {"add", "__add__", "__iadd__", "add_", "__radd__"},
    {"mul", "__mul__", "__imul__", "__rmul__"},
)
_ACTIVATIONS = {"silu", "gelu", "relu"}
_NORMS = ("norm", "call")  # kinds of operations: norms of transformers' classes, and layer norms
_NEAR, _FAR = 1e-2, 1e9  # logits that a cap leaves nearly alone, and that only a cap keeps small
Emit = Callable[[Program, list[Slot], Slot], None]


@dataclass(eq=False)
class _Row:
    """A tensor [T, width] that operations keep in a slot. `origin` is its first name."""

    width: int
    origin: Ref
    op: _Op


@dataclass(eq=False)
class _Part:
    """Rows of a linear layer's weight, which is stored [in, out] where it `is_turned`."""

    weight: str
    bias: str | None
    is_turned: bool
    index: Tensor | None = None


@dataclass(eq=False)
class _Op:
    """`make` loads what it needs and returns how it is emitted. One in place overwrites one of its inputs."""

    kind: str
    inputs: list[_Row]
    make: Callable[[], Emit]
    parts: list[_Part] = field(default_factory=list[_Part])
    name: str = ""
    attention: _Attend | None = None
    emit: Emit | None = None
    is_in_place: bool = False
    layer: Any = None  # a norm, which may be joined with a sum


@dataclass(eq=False)
class _Attend:
    """What an attention call needs beside its input."""

    layer: int
    spec: AttentionSpec
    backend: AttentionBackend
    row_norms: list[tuple[str, Tensor]]
    head_norms: tuple[str, str, bool] | None
    order: Tensor
    table: int | None
    sinks: str | None
    out: list[_Part] = field(default_factory=list[_Part])


@dataclass(eq=False)
class _Heads:
    """How queries, keys or values come of a linear layer's outputs."""

    row: _Row
    index: Tensor  # [H, D] of the row's width
    scale: float
    norm: str | None
    is_norm_after: bool
    order: Tensor | None  # [D]: pairs that turn lie half a head apart
    tables: tuple[Tensor, Tensor] | None  # cos and sin, [L, D / 2]


class NativeModel(Model):
    """A model that is a native program and nothing else."""

    pooling_head = None

    def __init__(
        self, native: NativeForward, head: LogitsHead, backends: list[AttentionBackend], kept: list[Any]
    ) -> None:
        """`kept` hold the tensors that the program has the addresses of."""
        self.native = self._native = native
        self._head, self._backends, self._kept = head, backends, kept
        self.weight_bytes, self.batch_variance_reason = 0, ""

    @property
    def attention_backends(self) -> list[AttentionBackend]:
        return self._backends

    @property
    def is_capturable(self) -> bool:
        return False

    @property
    def captures_chunks(self) -> bool:
        return False

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: KVCaches,
        metadata: AttentionMetadata,
        rope_lengths: Tensor | None = None,
        token_types: Tensor | None = None,
    ) -> Tensor:
        return self._native.compute_hidden(
            input_ids, positions, kv_caches, metadata, rope_lengths, token_types
        )

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)


class Translator:
    """Makes a NativeModel of a trace and a model; all is understood before anything is made."""

    def __init__(
        self,
        trace: Trace,
        model: nn.Module,
        spec: ModelSpec,
        layers: Sequence[tuple[AttentionSpec, AttentionBackend]],
        max_model_len: int,
        dtype: torch.dtype,
        make_linear: MakeLinear,
    ) -> None:
        self._trace, self._model, self._spec, self._dtype = trace, model, spec, dtype
        self._layers, self._max_len, self._make_linear = layers, max_model_len, make_linear
        self._rows: dict[Ref, _Row] = {}
        self._ops: list[_Op] = []
        self._outs: dict[_Op, _Row] = {}
        self._attended: dict[Ref, _Attend] = {}
        self._tables: list[tuple[Tensor, Tensor]] = []
        self._turns: dict[Any, tuple[Tensor, tuple[Tensor, Tensor]]] = {}
        self._bases: dict[Ref, frozenset[Ref]] = {}
        self._moving: dict[Ref, bool] = {}
        self.num_bytes = 0

    def translate(self, logits: Ref) -> NativeModel:
        """NotTracedError or NotNativeError: some part of it is not understood, or has no operation."""
        for index in range(len(self._trace.nodes)):
            self._read(index)
        hidden, head_part, scale, cap = self._read_tail(logits)
        self._prune(hidden)
        head = LogitsHead(
            self._linear([head_part]),
            self._spec.vocab_size,
            cap,
            None if scale == 1.0 else Scaled(self._spec.hidden_size, scale),
        )
        for op in self._ops:
            op.emit = op.make()
        self._hidden, self._head = hidden, head
        table = torch.empty(0, dtype=self._dtype)
        native = make_native_forward(self._emit, self._spec, table, [], head, splits_tokens=False)
        if native is None:
            raise NotNativeError("an operation")
        backends = list(dict.fromkeys(backend for _, backend in self._layers))
        kept: list[Any] = [self._tables, *((op.emit, op.layer) for op in self._ops)]
        return NativeModel(native, head, backends, kept)

    # -- reading

    def _read(self, index: int) -> None:
        ref, node = Ref(index), self._trace.nodes[index]
        if node.kind == "norm" or (node.kind == "call" and node.name == "layer_norm"):
            x = self._rows.get(node.args[0])
            if x is not None and self._trace.shapes[node.args[0]][-1] == x.width:
                self._add(ref, x.width, _Op(node.kind, [x], lambda: self._make_norm(ref), name=node.name))
        elif node.kind == "attend":
            self._read_attention(ref)
        elif node.kind == "act" or node.name in _ACTIVATIONS:
            x = self._rows.get(node.args[0])
            name = self._find_activation(ref)
            if x is not None and name is not None and x.op.kind == "linear" and not x.op.name:
                self._add_linear(ref, x.op.inputs[0], x.op.parts, x.width, name)
        elif node.name == "linear" and node.args[1] != _IDS:
            x_ref, weight, *rest = node.args
            bias = rest[0] if rest else (node.kwargs or {}).get("bias")
            self._read_linear(ref, x_ref, weight, bias, is_turned=False)
        elif node.name == "addmm":
            self._read_linear(ref, node.args[1], node.args[2], node.args[0], is_turned=True)
        elif node.name == "embedding" and node.args[0] == _IDS:
            name = self._name(node.args[1])
            self._add(ref, self._trace.shapes[ref][-1], _Op("embed", [], lambda: self._make_embed(name)))
        elif node.name in _ADDS | _SCALES and len(node.args) == 2 and not node.kwargs:
            self._read_pair(ref, node.args[0], node.args[-1])
        elif node.name in ("div", "__truediv__") and node.args[0] in self._rows:
            self._read_scale(ref, self._rows[node.args[0]], node.args[1], is_divisor=True)
        elif node.kind == "call" and node.name in _SAME:
            self._read_same(ref, node.args)

    def _read_same(self, ref: Ref, args: tuple[Any, ...]) -> None:
        """The same numbers in the same order; a result of attention becomes a row."""
        shapes, before = self._trace.shapes, args[0]
        if not isinstance(before, Ref) or ref not in shapes or any(isinstance(x, Ref) for x in args[1:]):
            return
        if isinstance(args[-1], tuple) and any(isinstance(x, Ref) for x in args[-1]):
            return
        is_same = self._trace.dtypes[ref] == self._trace.dtypes[before]
        if not is_same or shapes[ref].numel() != shapes[before].numel():
            return
        if before in self._attended:
            attend, shape = self._attended[before], shapes[ref]
            if shape[-1] == attend.spec.query_size:
                self._rows[ref] = _Row(shape[-1], ref, _Op("attended", [], _never, attention=attend))
            else:
                self._attended[ref] = attend
        elif before in self._rows and shapes[ref][-1] == self._rows[before].width:
            self._rows[ref] = self._rows[before]

    def _read_linear(self, ref: Ref, x_ref: Ref, weight: Any, bias: Any, *, is_turned: bool) -> None:
        x = self._rows.get(x_ref)
        if x is None or self._trace.shapes[x_ref][-1] != x.width:
            return
        part = _Part(self._name(weight), None if bias is None else self._name(bias), is_turned)
        width = self._trace.shapes[ref][-1]
        if x.op.kind == "attended":
            attend = x.op.attention
            assert attend is not None
            if attend.out:
                raise NotTracedError("attention whose result is read twice")
            attend.out.append(part)
            self._add(ref, width, self._find_attention(attend))
        else:
            self._add_linear(ref, x, [part], width)

    def _add_linear(self, ref: Ref, x: _Row, parts: list[_Part], width: int, act: str = "") -> None:
        op = _Op("linear", [x], _never, parts, act)
        op.make = lambda: self._make_plain(op)
        self._add(ref, width, op)

    def _add(self, ref: Ref, width: int, op: _Op) -> None:
        if self._trace.dtypes[ref] is not self._dtype:
            raise NotTracedError("numbers of another type")
        row = _Row(width, ref, op)
        self._rows[ref] = self._outs[op] = row
        if op.kind != "attend":
            self._ops.append(op)

    def _read_pair(self, ref: Ref, a: Any, b: Any) -> None:
        name, shapes = self._trace.nodes[ref.node].name, self._trace.shapes
        x, y = (self._rows.get(each) if isinstance(each, Ref) else None for each in (a, b))
        if name in _SCALES:
            if isinstance(a, Ref) and isinstance(b, Ref) and self._find_bases(a) and self._find_bases(b):
                self._read_gated(ref, a, b)
            elif x is not None or y is not None:
                self._read_scale(ref, x or y, b if x is not None else a, is_divisor=False)  # pyright: ignore
        elif x is not None and y is not None and shapes[a][-1] == shapes[b][-1] == x.width:
            op = _Op("add", [x, y], lambda: _emit_nothing, is_in_place=True)
            self._add(ref, x.width, op)
        elif (x is None) != (y is None):
            row, other = (x, b) if x is not None else (y, a)
            assert row is not None
            if isinstance(other, Ref) and not self._find_bases(other) and self._moves(other):
                width = row.width
                make = lambda: self._make_positions(other, width)  # noqa: E731
                self._add(ref, row.width, _Op("add_rows", [row], make, is_in_place=True))

    def _read_scale(self, ref: Ref, row: _Row, by: Any, *, is_divisor: bool) -> None:
        if isinstance(by, Ref):
            if self._find_bases(by) or self._moves(by) or self._trace.shapes[by].numel() != 1:
                return
            by = self._run_constant(by).item()
        factor = 1 / by if is_divisor else float(by)
        self._add(
            ref, row.width, _Op("scale", [row], lambda: self._make_scale(row.width, factor), is_in_place=True)
        )

    def _read_gated(self, ref: Ref, a: Ref, b: Ref) -> None:
        for gate, up in ((a, b), (b, a)):
            base = self._find_base(gate)
            act = None if base is None or base not in self._trace.shapes else self._find_activation(base)
            if act is None or base is None:
                continue
            source = self._trace.nodes[base.node].args[0]
            bases = self._find_base(source), self._find_base(up)
            rows = [self._rows.get(each) if each else None for each in bases]
            if None in rows or any(row.op.kind != "linear" or row.op.name for row in rows):  # pyright: ignore
                continue
            gate_row, up_row = rows
            assert gate_row is not None
            assert up_row is not None
            if gate_row.op.inputs != up_row.op.inputs or (base != gate and gate not in self._rows):
                continue
            parts: list[_Part] = []
            for row, target in ((gate_row, source), (up_row, up)):
                scale, index = self._select(row.origin, target)
                if (scale != 1).any():
                    return
                parts.append(_pick(row.op.parts, index))
            width = self._trace.shapes[ref][-1]
            self._add_gated(ref, gate_row.op.inputs[0], parts, width, act)
            return

    def _add_gated(self, ref: Ref, x: _Row, parts: list[_Part], width: int, act: str) -> None:
        op = _Op("gated", [x], _never, parts, act)
        op.make = lambda: self._make_gated(op, width)
        self._add(ref, width, op)

    # -- attention

    def _read_attention(self, ref: Ref) -> None:
        query, key, value, sinks = self._trace.nodes[ref.node].args
        layer = len(self._attended_layers())
        spec, backend = self._layers[layer]
        if not isinstance(backend, NativeAttention):
            raise NotNativeError(type(backend).__name__)
        for each, heads in ((query, spec.num_heads), (key, spec.num_kv_heads), (value, spec.num_kv_heads)):
            if tuple(self._trace.shapes[each])[1:] != (heads, NUM_TOKENS, spec.head_size):
                raise NotTracedError("heads narrower than the cache's")
        q, k, v = (self._find_heads(each) for each in (query, key, value))
        is_turned = q.tables is not None
        if v.scale != 1 or v.tables is not None or v.norm is not None or v.row.op.kind != "linear":
            raise NotTracedError("values that are more than projected")
        if is_turned != (k.tables is not None) or (q.norm is None) != (k.norm is None):
            raise NotTracedError("queries and keys that differ")
        order, table = torch.arange(spec.head_size), None
        if q.tables is not None and k.tables is not None:
            assert q.order is not None
            assert k.order is not None
            is_equal = torch.equal(q.order, k.order)
            if not is_equal or any(not torch.equal(x, y) for x, y in zip(q.tables, k.tables, strict=True)):
                raise NotTracedError("queries and keys that turn by other angles")
            order = q.order
            table = next((i for i, each in enumerate(self._tables) if each[0] is q.tables[0]), None)
            if table is None:
                table = len(self._tables)
                self._tables.append(q.tables)
        elif q.scale * k.scale != 1:
            spec = replace(spec, scale=(spec.scale or spec.head_size**-0.5) * q.scale * k.scale)
        parts: list[_Part] = []
        inputs: list[_Row] = []
        row_norms: list[tuple[str, Tensor]] = []
        for heads, permutes in ((q, True), (k, True), (v, False)):
            index = (heads.index[:, order] if permutes else heads.index).flatten()
            op = heads.row.op
            if op.kind == "norm":  # of all heads together
                row_norms.append((op.name, index))
                op = op.inputs[0].op
                if len(index) != heads.row.width:
                    raise NotTracedError("a norm of more than the heads")
            if op.kind != "linear" or op.name:
                raise NotTracedError("heads that are no linear layer's")
            inputs.append(op.inputs[0])
            parts.append(_pick(op.parts, index))
        if any(each is not inputs[0] for each in inputs) or len(row_norms) == 1:
            raise NotTracedError("heads of several inputs")
        norms = None if q.norm is None or k.norm is None else (q.norm, k.norm, q.is_norm_after)
        attend = _Attend(
            layer, spec, backend, row_norms, norms, order, table, None if sinks is None else self._name(sinks)
        )
        op = _Op("attend", inputs[:1], lambda: self._make_attention(op), parts, attention=attend)
        self._ops.append(op)
        self._attended[ref] = attend

    def _attended_layers(self) -> set[int]:
        return {attend.layer for attend in self._attended.values()}

    def _find_attention(self, attend: _Attend) -> _Op:
        return next(op for op in reversed(self._ops) if op.attention is attend)

    def _find_heads(self, ref: Ref) -> _Heads:
        base = self._find_base(ref)
        if base is None:
            raise NotTracedError("heads of several sources")
        norm, is_after, upper = None, False, None
        if self._trace.nodes[base.node].kind == "norm" and base not in self._rows:
            norm, upper, middle = (
                self._trace.nodes[base.node].name,
                base,
                self._trace.nodes[base.node].args[0],
            )
            base = self._find_base(middle)
            if base is None:
                raise NotTracedError("a norm of several sources")
        else:
            middle = ref
        if base not in self._rows:
            raise NotTracedError(f"heads behind {self._trace.nodes[base.node].name}")
        row = self._rows[base]
        num_heads, size = self._trace.shapes[ref][1], self._trace.shapes[ref][3]
        scale, index = self._select(base, middle)
        turning = (base, middle, index) if self._moves_between(base, middle) else None
        if upper is not None:
            upper_scale, places = self._select(upper, ref)
            scale, index = scale[places] * upper_scale, index[places]
            if self._moves_between(upper, ref):
                if turning is not None:
                    raise NotTracedError("heads that turn twice")
                turning = upper, ref, places
            else:
                is_after = turning is not None
        order = tables = None
        if turning is not None:
            order, tables = self._find_turn(*turning, num_heads, size)
        elif (scale != scale[0]).any():
            raise NotTracedError("heads that are multiplied by several numbers")
        return _Heads(row, index.view(num_heads, size), scale[0].item(), norm, is_after, order, tables)

    def _find_turn(
        self, base: Ref, ref: Ref, index: Tensor, num_heads: int, size: int
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The order of a head's numbers in which pairs lie half a head apart, and the pairs' cos and sin."""
        width = self._count_numbers(base)
        index = index.view(num_heads, size)
        at_one = torch.ones(NUM_TOKENS, dtype=torch.int64)
        columns: list[Tensor] = []
        for first in range(0, size, NUM_TOKENS):
            count = min(NUM_TOKENS, size - first)
            x = torch.zeros(NUM_TOKENS, width)
            for token in range(count):
                x[token, index[:, first + token]] = 1
            out = self._run(base, ref, x, at_one).view(NUM_TOKENS, num_heads, size)[:count]
            if (out != out[:, :1]).any():
                raise NotTracedError("heads that turn by other angles")
            columns.append(out[:, 0])
        matrix = torch.cat(columns).t()  # [out, in]
        off = matrix - torch.diag(matrix.diagonal())
        if ((off != 0).sum(1) > 1).any():
            raise NotTracedError("heads that do more than turn")
        partner = off.abs().argmax(1)
        firsts = [i for i in range(size) if off[i, partner[i]] < 0]
        alone = [i for i in range(size) if not off[i].any()]
        seconds, middle = [int(partner[i]) for i in firsts], len(alone) // 2
        order = torch.tensor(firsts + alone[:middle] + seconds + alone[middle:])
        if sorted(order.tolist()) != list(range(size)) or len(alone) % 2:
            raise NotTracedError("heads that do more than turn")
        moving = frozenset(self._find_moving(base, ref))
        key = moving, tuple(order.tolist()), tuple(matrix.flatten().tolist())
        if key not in self._turns:
            self._turns[key] = order, self._make_tables(base, ref, index[0], order, width)
        return self._turns[key]

    def _make_tables(
        self, base: Ref, ref: Ref, index: Tensor, order: Tensor, width: int
    ) -> tuple[Tensor, Tensor]:
        half = len(order) // 2
        x = torch.zeros(NUM_TOKENS, width)
        x[:, index[order[:half]]] = 1
        parts: list[Tensor] = []
        for first in range(0, self._max_len, NUM_TOKENS):
            positions = torch.arange(first, first + NUM_TOKENS).clamp(max=self._max_len - 1)
            parts.append(self._run(base, ref, x, positions)[:, : len(order)][:, order])
        both = torch.cat(parts)[: self._max_len].float()
        return both[:, :half].contiguous(), both[:, half:].contiguous()

    # -- trying

    def _count_numbers(self, base: Ref) -> int:
        return self._trace.shapes[base].numel() // NUM_TOKENS

    def _run(self, base: Ref, ref: Ref, x: Tensor, positions: Tensor) -> Tensor:
        """[T, numbers of a token in `ref`] of x [T, numbers of a token in `base`]."""
        shape = list(self._trace.shapes[base])
        if shape.count(NUM_TOKENS) != 1:
            raise NotTracedError("sizes that hide the tokens")
        place = shape.index(NUM_TOKENS)
        given = x.view(NUM_TOKENS, *shape[:place], *shape[place + 1 :]).movedim(0, place)
        known = {base: given, _POSITIONS: positions[None]}
        out = self._trace.compute(ref, known, self._find_constant)
        if list(out.shape).count(NUM_TOKENS) != 1:
            raise NotTracedError("sizes that hide the tokens")
        return out.movedim(list(out.shape).index(NUM_TOKENS), 0).reshape(NUM_TOKENS, -1)

    def _select(self, base: Ref, ref: Ref) -> tuple[Tensor, Tensor]:
        """(factors, indexes): which number of `base` each of `ref` is, times what, at position 0."""
        width, zeros = self._count_numbers(base), torch.zeros(NUM_TOKENS, dtype=torch.int64)
        ones, counts = torch.ones(NUM_TOKENS, width), torch.arange(width).float().expand(NUM_TOKENS, width)
        scale = self._run(base, ref, ones, zeros)[0]
        found = self._run(base, ref, counts, zeros)[0]
        index = (found / scale).round()
        if not (scale.isfinite().all() and (scale != 0).all() and torch.allclose(index * scale, found, 1e-6)):
            raise NotTracedError("more than a choice of a layer's outputs")
        return scale, index.long().clamp(0, width - 1)

    def _run_constant(self, ref: Ref) -> Tensor:
        return self._trace.compute(ref, {}, self._find_constant)

    def _find_constant(self, name: str) -> Tensor | None:
        holder, _, key = name.rpartition(".")
        value: Any = getattr(self._model.get_submodule(holder), key, None)
        return value.data if isinstance(value, Tensor) else None

    def _find_bases(self, ref: Ref) -> frozenset[Ref]:
        """The results that it is made of which are no calls in between; none: of positions alone."""
        if ref in self._rows:
            return frozenset({ref})
        ref_node = self._trace.nodes[ref.node]
        if ref not in self._bases:
            if ref_node.kind in ("norm", "act", "attend") or ref == _IDS or ref_node.name in _ACTIVATIONS:
                found = frozenset({ref})
            else:
                found = frozenset[Ref]().union(*map(self._find_bases, _list_refs(ref_node)))
            self._bases[ref] = found
        return self._bases[ref]

    def _find_base(self, ref: Ref) -> Ref | None:
        bases = self._find_bases(ref)
        return next(iter(bases)) if len(bases) == 1 else None

    def _moves(self, ref: Ref) -> bool:
        """Whether it is made of positions."""
        if ref not in self._moving:
            is_moving = ref == _POSITIONS or any(map(self._moves, _list_refs(self._trace.nodes[ref.node])))
            self._moving[ref] = is_moving
        return self._moving[ref]

    def _moves_between(self, base: Ref, ref: Ref) -> bool:
        return any(True for _ in self._find_moving(base, ref))

    def _find_moving(self, base: Ref, ref: Ref) -> set[Ref]:
        """What `ref` is made of beside `base` that goes by positions."""
        found, left, seen = set[Ref](), [ref], set[Ref]()
        while left:
            each = left.pop()
            if each == base or each in seen:
                continue
            seen.add(each)
            if not self._find_bases(each):
                if self._moves(each):
                    found.add(self._find_stem(each))
            else:
                left += _list_refs(self._trace.nodes[each.node])
        return found

    def _find_stem(self, ref: Ref) -> Ref:
        """The same numbers before they were given another shape, by layers each for itself."""
        node = self._trace.nodes[ref.node]
        return self._find_stem(node.args[0]) if node.name in ("unsqueeze", "view", "to") else ref

    def _find_activation(self, ref: Ref) -> str | None:
        node = self._trace.nodes[ref.node]
        if node.kind == "act":
            return find_activation(self._model.get_submodule(node.name))
        if node.kind != "call" or node.name not in _ACTIVATIONS or node.function is None:
            return None
        function, others, named = node.function, node.args[1:], node.kwargs or {}
        return find_activation(lambda x: function(x, *others, **named))

    def _name(self, ref: Any) -> str:
        node = self._trace.nodes[ref.node] if isinstance(ref, Ref) else None
        if node is None or node.kind != "constant":
            raise NotTracedError("a weight that is computed")
        return node.name

    # -- the end

    def _read_tail(self, logits: Ref) -> tuple[_Row, _Part, float, float | None]:
        """(hidden states, the projection, a factor, a cap)."""
        base = self._find_base(logits)
        row = self._rows.get(base) if base is not None else None
        while row is not None and row.op.kind == "scale":
            row = row.op.inputs[0]
        if row is None or row.op.kind != "linear" or row.op.name:
            raise NotTracedError("logits that are no linear layer's")
        x = torch.linspace(-90, 90, row.width).expand(NUM_TOKENS, -1).contiguous()
        tried = self._run(row.origin, logits, x, _ZEROS)
        near, far = (
            self._run(row.origin, logits, torch.full_like(x, each), _ZEROS)[0, 0].item() / each
            for each in (_NEAR, _FAR)
        )
        cap = far * _FAR if far < near / 1e3 else None
        expected = x * near if cap is None else cap * torch.tanh(x * near / cap)
        if not torch.allclose(tried, expected, 1e-4, 1e-4):
            raise NotTracedError("logits that are more than scaled or capped")
        factor = 1.0 if abs(near - 1) < 1e-6 else near
        if row.op.parts[0].bias is not None and factor != 1:
            raise NotTracedError("logits with a bias that are scaled")
        return row.op.inputs[0], row.op.parts[0], factor, cap

    def _prune(self, hidden: _Row) -> None:
        used, kept = {hidden.op}, list[_Op]()
        for op in reversed(self._ops):
            if op in used:
                kept.append(op)
                used.update(row.op for row in op.inputs)
        self._ops = kept[::-1]
        if len([op for op in self._ops if op.kind == "attend"]) != len(self._layers):
            raise NotTracedError("layers without use")
        if hidden.op.kind not in _NORMS:
            raise NotTracedError("hidden states that are no norm's")

    # -- making

    def _take(self, name: str) -> Tensor:
        tensor = self._find_constant(name)
        if tensor is None or tensor.dtype is not self._dtype:
            raise NotTracedError(name)
        return tensor

    def _copy(self, name: str) -> Tensor:
        tensor = self._take(name).clone()
        self.num_bytes += tensor.nbytes
        return tensor

    def _linear(self, parts: list[_Part]) -> Linear:
        weights, biases = list[Tensor](), list[Tensor]()
        for part in parts:
            weight = self._take(part.weight)
            weight = weight.t().contiguous() if part.is_turned else weight
            weights.append(weight if part.index is None else weight[part.index])
            if part.bias is not None:
                bias = self._take(part.bias)
                biases.append(bias if part.index is None else bias[part.index])
            elif any(each.bias is not None for each in parts):
                biases.append(torch.zeros(len(weights[-1]), dtype=self._dtype))
        linear = self._make_linear([part.weight.removesuffix(".weight") for part in parts], weights, biases)
        if not linear.is_exact:
            raise NotNativeError(type(linear).__name__)
        return linear

    def _make_plain(self, op: _Op) -> Emit:
        linear = self._linear(op.parts)
        linear.activation = op.name or None
        return lambda program, inputs, y: linear.emit(program, inputs[0], y)

    def _make_gated(self, op: _Op, width: int) -> Emit:
        linear, activation = self._linear(op.parts), GatedActivation(op.name, self._dtype, _CPU)

        def emit(program: Program, inputs: list[Slot], y: Slot) -> None:
            wide = program.slot("gate_up", 2 * width)
            linear.emit(program, inputs[0], wide)
            activation.emit(program, wide, y, width)

        return emit

    def _make_embed(self, name: str) -> Emit:
        table = self._copy(name)
        size = table.shape[1]

        def emit(program: Program, inputs: list[Slot], y: Slot) -> None:
            del inputs
            program.add(Kind.EMBED, Embed(table=table.data_ptr(), y=y, size=size))

        return emit

    def _make_positions(self, ref: Ref, width: int) -> Emit:
        parts: list[Tensor] = []
        for first in range(0, self._max_len, NUM_TOKENS):
            positions = torch.arange(first, first + NUM_TOKENS).clamp(max=self._max_len - 1)
            out = self._trace.compute(ref, {_POSITIONS: positions[None]}, self._find_constant)
            parts.append(out.reshape(NUM_TOKENS, width))
        table = torch.cat(parts)[: self._max_len].to(self._dtype).contiguous()
        self.num_bytes += table.nbytes

        def emit(program: Program, inputs: list[Slot], y: Slot) -> None:
            del inputs
            program.add(Kind.ADD_ROWS, AddRows(table=table.data_ptr(), x=y, size=width))

        return emit

    def _make_scale(self, width: int, factor: float) -> Emit:
        def emit(program: Program, inputs: list[Slot], y: Slot) -> None:
            del inputs
            program.add(Kind.SCALE, Scale(x=y, size=width, factor=factor))

        return emit

    def _make_norm(self, ref: Ref) -> Emit:
        node = self._trace.nodes[ref.node]
        op = self._rows[ref].op
        if node.kind == "norm":
            op.layer = self._find_norm(node.name)
        else:
            named = dict(zip(("", "shape", "weight", "bias", "eps"), node.args, strict=False)) | (
                node.kwargs or {}
            )
            width = self._rows[ref].width
            weight, bias = named.get("weight"), named.get("bias")
            ones = torch.ones(width, dtype=self._dtype) if weight is None else self._copy(self._name(weight))
            shift = None if bias is None else self._copy(self._name(bias))
            op.layer = LayerNorm(ones, shift, named.get("eps", 1e-5))
        layer = op.layer
        return lambda program, inputs, y: layer.emit(program, inputs[0], y)

    def _find_norm(self, name: str) -> RMSNorm:
        norm = make_norm(self._model.get_submodule(name), self._dtype, _CPU)
        if norm is None:
            raise NotTracedError(name)
        self.num_bytes += norm.weight.nbytes
        return norm

    def _make_attention(self, op: _Op) -> Emit:
        attend = op.attention
        assert attend is not None
        head_norms, row_norms = None, list[RMSNorm]()
        if attend.head_norms is not None:
            *names, is_after = attend.head_norms
            norms = [self._find_norm(str(name)) for name in names]
            offset = norms[0].numbers[1]
            weights = [(norm.weight + offset if offset else norm.weight)[attend.order] for norm in norms]
            if norms[0].numbers[0] != norms[1].numbers[0] or len(weights[0]) != attend.spec.head_size:
                raise NotTracedError("norms of heads that differ")
            head_norms = QKNorm(weights[0], weights[1], norms[0].numbers[0], bool(is_after))
        for name, index in attend.row_norms:
            norm = self._find_norm(name)
            norm.weight = norm.weight[index].contiguous()
            row_norms.append(norm)
        sinks = None if attend.sinks is None else self._take(attend.sinks).float().contiguous()
        qkv, out = self._linear(op.parts), self._linear(attend.out)
        layer = Attention(attend.spec, qkv, out, head_norms, tuple(row_norms), attend.backend, None, sinks)
        op.layer = layer
        return _emit_nothing

    def _emit(self, program: Program) -> None:
        last_uses: dict[_Row, int] = {}
        for index, op in enumerate(self._ops):
            last_uses.update(dict.fromkeys(op.inputs, index))
        last_uses[self._hidden] = len(self._ops)
        slots, free, counts = dict[_Row, Slot](), dict[int, list[Slot]](), dict[int, int]()

        def take(row: _Row) -> Slot:
            if row is self._hidden and not program.wants_logits:
                return OUT
            if free.get(row.width):
                return free[row.width].pop()
            counts[row.width] = counts.get(row.width, 0) + 1
            return program.slot(f"rows_{row.width}_{counts[row.width]}", row.width)

        angles = [_emit_angles(program, index, *tables) for index, tables in enumerate(self._tables)]
        num_left, added, waiting = len(self._layers), None, set[_Row]()
        for index, op in enumerate(self._ops):
            inputs, out = [slots[row] for row in op.inputs], self._outs[op]
            dying = {row for row in op.inputs if last_uses[row] == index}
            if op.is_in_place:
                row = next((row for row in op.inputs if row in dying), None)
                if row is None:
                    raise NotNativeError("a sum of what is read again")
                dying.discard(row)
                slots[out] = y = slots[row]
            else:
                slots[out] = y = take(out)
            assert op.emit is not None
            if op.kind == "add":
                x = next((slots[each] for each in op.inputs if slots[each] != y), None)
                if x is None:
                    raise NotNativeError("a sum of what is the same")
                following = self._ops[index + 1]  # there is one, for the last is a norm
                added = x, y
                if following.kind not in _NORMS or following.inputs != [out]:
                    program.add(Kind.ADD, Add(x=x, residual=y, size=out.width))
                    added = None
            elif op.kind == "attend":
                num_left -= 1
                attend = op.attention
                assert attend is not None
                turn = None if attend.table is None else angles[attend.table]
                mixed = op.layer.emit_write(program, inputs[0], turn, attend.layer)
                if num_left == 0 and program.wants_logits:
                    live = {slots[row] for row in slots if last_uses[row] > index and row is not out}
                    program.keep_sampled([*mixed, *sorted(live)])
                op.layer.emit_attend(program, mixed, y, attend.layer)
            elif added is not None:
                op.layer.emit(program, added[0], y, added[1])
                added = None
            else:
                op.emit(program, inputs, y)
            waiting |= dying
            if added is not None:  # the norm that is joined with this sum reads them
                continue
            for row in waiting:
                free.setdefault(row.width, []).append(slots[row])
            waiting.clear()
        if program.wants_logits:
            self._head.emit(program, slots[self._hidden])


_CPU = torch.device("cpu")
_ZEROS = torch.zeros(NUM_TOKENS, dtype=torch.int64)


def _never() -> Emit:
    raise NotTracedError("a part that is no operation")


def _emit_nothing(program: Program, inputs: list[Slot], y: Slot) -> None:
    """Of operations that `_emit` writes itself."""


def _emit_angles(program: Program, index: int, cos_table: Tensor, sin_table: Tensor) -> AngleSlots:
    half = cos_table.shape[1]
    cos, sin = (program.slot(f"{name}{index}", half, torch.float32) for name in ("cos", "sin"))
    operation = ops.Angles(cos=cos, sin=sin, half=half, rope=index)
    operation.cos_table, operation.sin_table = cos_table.data_ptr(), sin_table.data_ptr()
    program.add(Kind.ANGLES, operation)
    return AngleSlots(cos, sin)


def _list_refs(node: Any) -> list[Ref]:
    found, left = list[Ref](), [node.args, tuple((node.kwargs or {}).values())]
    while left:
        each: Any = left.pop()
        if isinstance(each, Ref):
            found.append(each)
        elif isinstance(each, (tuple, list)):
            left += each
    return found


def _pick(parts: list[_Part], index: Tensor) -> _Part:
    if len(parts) != 1:
        raise NotTracedError("a choice of several layers' outputs")
    return _Part(parts[0].weight, parts[0].bias, parts[0].is_turned, index)
