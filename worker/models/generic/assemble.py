"""Rows of a trace as a Decoder: its layers compute a step in Python, and emit the native program of it.

What the layers of a model are is read off its sums, from the last one back: each layer adds what attention
and a feed-forward network make of the sum so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ....ipc.spec.model_spec import AttentionSpec
from ....kernels.program.program import NotNativeError
from ...attention import AttentionBackend, QKNorm
from ...layers.attention import Attention
from ...layers.embedding import Embedding
from ...layers.feed_forward import MLP, GatedActivation, PlainMLP
from ...layers.linear import Linear
from ...layers.logits import LogitsHead
from ...layers.norm import LayerNorm, NoNorm, RMSNorm, Scaled
from ...layers.rotary import RotaryTables
from ..decoder import Decoder, DecoderLayer, Norm, ParallelLayer
from .layers import MakeLinear, make_norm
from .rows import AttentionCall, Row, RowReader, Weight
from .trace import NotTracedError, Ref, Trace
from .trials import Trials, Turn

_CPU = torch.device("cpu")


class _Branch(NamedTuple):
    """What a layer adds to the sum: `core` of `x`, then a norm and a scale of that, if there are any."""

    x: Row
    core: Row
    norm: Row | None
    scale: Row | None


class _LayerRows(NamedTuple):
    before: Row  # the sum before the layer
    attention: _Branch
    ffn: _Branch
    ffn_sum: Row  # of which the ffn is computed, normed or not
    call: AttentionCall


def assemble(
    trace: Trace,
    logits: Ref,
    model: nn.Module,
    layers: Sequence[tuple[AttentionSpec, AttentionBackend]],
    max_model_len: int,
    dtype: torch.dtype,
    make_linear: MakeLinear,
) -> Decoder:
    """The decoder that computes a trace's logits, with copies of the model's weights, `weight_bytes` those
    that `make_linear` has not seen. Raises NotTracedError, before anything is made, or NotNativeError.
    """
    trials = Trials(trace, model, max_model_len)
    reader = RowReader(trials, [spec for spec, _ in layers], dtype)
    hidden, weight, factor, cap = reader.find_logits(logits)
    if hidden.kind != "norm":
        raise NotTracedError("hidden states that are no norm's")
    parts, (row,) = list[_LayerRows](), hidden.inputs
    while row.kind == "sum":
        parts.insert(0, _split_layer(row))
        row = parts[0].before
    if [part.call.layer for part in parts] != list(range(len(layers))):
        raise NotTracedError("layers in another order")
    maker = _Maker(trials, model, [backend for _, backend in layers], dtype, make_linear)
    embedding = maker.make_embedding(row)
    made = [maker.make_layer(part) for part in parts]
    scale = None if factor == 1.0 else Scaled(hidden.width, factor)
    head = maker.make_linear([weight])
    logits_head = LogitsHead(head, trace.shapes[logits][-1], cap, scale)
    norm = maker.make_norm(hidden)
    ropes = [RotaryTables(turn.cos, turn.sin) for turn in maker.turns]
    num_bytes = maker.num_bytes + sum(rope.size_bytes for rope in ropes)
    return Decoder(embedding, list(ropes), list(made), norm, logits_head, num_bytes, "")


def _read_branch(row: Row) -> _Branch | None:
    outs: dict[str, Row] = {}
    for kind in ("scale", "norm"):
        if row.kind == kind:
            outs[kind], (row,) = row, row.inputs
    norm, scale = outs.get("norm"), outs.get("scale")
    if row.kind == "attention":
        return _Branch(row.inputs[0], row, norm, scale)
    if row.kind == "linear" and not row.name and row.inputs[0].kind in ("linear", "gated"):
        return _Branch(row.inputs[0].inputs[0], row, norm, scale)
    return None


def _split_layer(row: Row) -> _LayerRows:
    """The layer whose sum it is: h + attention + ffn, added up in any order."""
    branches, middle, before = list[_Branch](), row, row
    for _ in range(2):
        for each, other in (before.inputs, before.inputs[::-1]):
            branch = _read_branch(other)
            if branch is not None:
                branches.append(branch)
                middle, before = before, each
                break
            pair = [_read_branch(part) for part in other.inputs] if other.kind == "sum" else []
            if len(pair) == 2 and not branches and None not in pair:
                branches, before = [part for part in pair if part is not None], each
                break
        if len(branches) == 2 or before.kind != "sum":
            break
    kinds = [branch.core.kind for branch in branches]
    if sorted(kinds) != ["attention", "linear"]:
        raise NotTracedError("a layer that is not attention and a network")
    attention, ffn = branches[kinds.index("attention")], branches[kinds.index("linear")]
    ffn_sum = middle if middle in (ffn.x, *ffn.x.inputs) and middle is not row else before
    call = attention.core.call
    assert call is not None
    return _LayerRows(before, attention, ffn, ffn_sum, call)


class _Maker:
    """Makes layers of rows; the CPU's, with copies of weights."""

    def __init__(
        self,
        trials: Trials,
        model: nn.Module,
        backends: list[AttentionBackend],
        dtype: torch.dtype,
        make_linear: MakeLinear,
    ) -> None:
        self._trials, self._model, self._backends = trials, model, backends
        self._dtype, self._make_linear = dtype, make_linear
        self.num_bytes, self.turns = 0, list[Turn]()

    def make_embedding(self, row: Row) -> Embedding:
        """Tokens, then a scale, positions and a norm, where the model has them."""
        norm = positions = scale = None
        if row.kind == "norm":
            norm, (row,) = self.make_norm(row), row.inputs
        if row.kind == "positions" and row.by is not None:
            positions = self._count(self._trials.compute_table(row.by).to(self._dtype).contiguous())
            (row,) = row.inputs
        if row.kind == "scale":
            scale, (row,) = row.number, row.inputs
        if row.kind != "embed":
            raise NotTracedError("an embedding of another kind")
        table = self._count(self._take(row.weights[0].weight).clone())
        return Embedding(table, scale, positions, norm=norm, rounds_scale=False)

    def make_layer(self, rows: _LayerRows) -> DecoderLayer | ParallelLayer:
        """One after the other, or both of the same sum."""
        attention_norm = self._make_norm_of(rows.attention.x, rows.before)
        attention, ffn = self._make_attention(rows.attention.core, rows.call), self._make_ffn(rows.ffn.core)
        rope = None if rows.call.turn is None else self.turns.index(rows.call.turn)
        if rows.ffn_sum is not rows.before:
            outs = [self._make_out(each) for each in (rows.attention, rows.ffn)]
            ffn_norm = self._make_norm_of(rows.ffn.x, rows.ffn_sum)
            return DecoderLayer(attention_norm, attention, outs[0], ffn_norm, ffn, outs[1], rope)
        is_shared = rows.ffn.x is rows.attention.x
        ffn_norm = None if is_shared else self._make_norm_of(rows.ffn.x, rows.before)
        has_outs = any(each.norm or each.scale for each in (rows.attention, rows.ffn))
        if has_outs or NoNorm in (type(attention_norm), type(ffn_norm)):
            raise NotTracedError("a parallel layer without norms before, or with norms behind")
        return ParallelLayer(attention_norm, attention, ffn_norm, ffn, rope)

    def _make_norm_of(self, x: Row, before: Row) -> Norm:
        """What makes `x` of the sum before it."""
        if x is before:
            return NoNorm(x.width)
        if x.kind != "norm" or x.inputs[0] is not before:
            raise NotTracedError("a part that does not read the sum before it")
        return self.make_norm(x)

    def _make_out(self, branch: _Branch) -> Norm | Scaled:
        norm = None if branch.norm is None else self.make_norm(branch.norm)
        if branch.scale is not None:
            return Scaled(branch.core.width, branch.scale.number, norm)
        return norm or NoNorm(branch.core.width)

    def make_norm(self, row: Row) -> RMSNorm | LayerNorm:
        """A norm of hidden states."""
        if row.name:
            return self._make_rms_norm(row.name)
        names = row.weights[0] if row.weights else None
        ones = torch.ones(row.width, dtype=self._dtype)
        weight = ones if names is None else self._take(names.weight).clone()
        bias = None if names is None or names.bias is None else self._count(self._take(names.bias).clone())
        return LayerNorm(self._count(weight), bias, row.number)

    def _make_rms_norm(self, name: str) -> RMSNorm:
        norm = make_norm(self._model.get_submodule(name), self._dtype, _CPU)
        if norm is None:
            raise NotTracedError(name)
        self._count(norm.weight)
        return norm

    def _make_ffn(self, down: Row) -> MLP | PlainMLP:
        (row,) = down.inputs
        up, down_proj = self.make_linear(row.weights), self.make_linear(down.weights)
        if row.kind == "gated":
            return MLP(up, GatedActivation(row.name, self._dtype, _CPU), down_proj, row.width)
        up.activation = row.name or None
        return PlainMLP(up, down_proj, row.width)

    def _make_attention(self, row: Row, call: AttentionCall) -> Attention:
        head_norms, row_norms = None, list[RMSNorm]()
        if call.head_norms is not None:
            *names, is_after = call.head_norms
            norms = [self._make_rms_norm(name) for name in names]
            (eps, offset, _), order = norms[0].numbers, slice(None) if call.turn is None else call.turn.order
            weights = [(norm.weight + offset if offset else norm.weight)[order] for norm in norms]
            if norms[0].numbers != norms[1].numbers or len(weights[0]) != call.spec.head_size:
                raise NotTracedError("norms of heads that differ")
            head_norms = QKNorm(weights[0], weights[1], eps, is_after)
        for name, index in call.row_norms:
            row_norms.append(self._make_rms_norm(name))
            row_norms[-1].weight = row_norms[-1].weight[index].contiguous()
        sinks = None if call.sinks is None else self._take(call.sinks).float().contiguous()
        if call.turn is not None and call.turn not in self.turns:
            self.turns.append(call.turn)
        qkv, out = self.make_linear(call.qkv), self.make_linear(row.weights)
        backend = self._backends[call.layer]
        return Attention(call.spec, qkv, out, head_norms, tuple(row_norms), backend, None, sinks)

    def make_linear(self, weights: Sequence[Weight]) -> Linear:
        """One layer of what is multiplied together."""
        tensors, biases = list[Tensor](), list[Tensor]()
        has_bias = any(each.bias is not None for each in weights)
        for each in weights:
            tensor = self._take(each.weight)
            tensor = tensor.t().contiguous() if each.is_turned else tensor
            tensors.append(tensor if each.outputs is None else tensor[each.outputs])
            if each.bias is not None:
                bias = self._take(each.bias)
                biases.append(bias if each.outputs is None else bias[each.outputs])
            elif has_bias:
                biases.append(torch.zeros(len(tensors[-1]), dtype=self._dtype))
        linear = self._make_linear([each.weight.removesuffix(".weight") for each in weights], tensors, biases)
        if not linear.is_exact:
            raise NotNativeError(type(linear).__name__)
        return linear

    def _take(self, name: str) -> Tensor:
        tensor = self._trials.find_constant(name)
        if tensor is None or tensor.dtype is not self._dtype:
            raise NotTracedError(name)
        return tensor

    def _count(self, tensor: Tensor) -> Tensor:
        self.num_bytes += tensor.nbytes
        return tensor
