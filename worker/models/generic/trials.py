"""What parts of a trace compute, told by their results for chosen numbers, whatever code they are.

A part lies between results that are known (rows that layers of ours compute) and one result. It may choose
numbers and multiply them, turn pairs of them by a token's position, or come of positions alone.
Legend: T tokens, N numbers of a token, D head size, L longest sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .layers import find_activation
from .trace import IDS, NUM_TOKENS, POSITIONS, NotTracedError, Ref, Trace

ACTIVATIONS = {"silu", "gelu", "relu"}
_OPAQUE = ("norm", "act", "attend")  # kinds of nodes that are not tried
_RESHAPES = ("unsqueeze", "view", "to")
_NEAR, _FAR = 1e-2, 1e9  # logits that a cap leaves nearly alone, and that only a cap keeps small


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """Rotation of a head: `order` [D] puts pairs half a head apart; their cos and sin are [L, D / 2]."""

    order: Tensor
    cos: Tensor
    sin: Tensor

    def equals(self, other: Turn) -> bool:
        """Whether it is the same by its numbers."""
        ours, theirs = (self.order, self.cos, self.sin), (other.order, other.cos, other.sin)
        return all(map(torch.equal, ours, theirs))


class Trials:
    """Runs parts of a trace with the constants of a model. A search for what a result is made of ends at
    `known` results.
    """

    def __init__(self, trace: Trace, model: nn.Module, max_len: int) -> None:
        self.trace, self._model, self._max_len = trace, model, max_len
        self.known: dict[Ref, Any] = {}
        self._sources: dict[Ref, frozenset[Ref]] = {}
        self._turns: dict[Any, Turn] = {}

    def find_sources(self, ref: Ref) -> frozenset[Ref]:
        """The known and the opaque results of which it is made; none: positions and constants alone."""
        if ref in self.known:
            return frozenset({ref})
        if ref not in self._sources:
            node = self.trace.nodes[ref.node]
            if ref.node == IDS or node.kind in _OPAQUE or node.name in ACTIVATIONS:
                self._sources[ref] = frozenset({ref})
            else:
                self._sources[ref] = frozenset[Ref]().union(*map(self.find_sources, node.refs))
        return self._sources[ref]

    def find_source(self, ref: Ref) -> Ref | None:
        """The only source, None where there is none or several."""
        sources = self.find_sources(ref)
        return next(iter(sources)) if len(sources) == 1 else None

    def is_by_position(self, ref: Ref) -> bool:
        """Whether it is made of positions, and of no known result."""
        return ref.node in self.trace.moving and not self.find_sources(ref)

    def find_turning(self, source: Ref, ref: Ref) -> frozenset[Ref]:
        """What goes by positions alone between a source and a result."""
        parts, left = set[Ref](), [ref]
        while left:
            each = left.pop()
            if self.is_by_position(each):
                parts.add(self.find_stem(each))
            elif each != source and self.find_sources(each):
                left += self.trace.nodes[each.node].refs
        return frozenset(parts)

    def find_stem(self, ref: Ref) -> Ref:
        """The same numbers before they were given another shape, which layers do each for itself."""
        node = self.trace.nodes[ref.node]
        return self.find_stem(node.args[0]) if node.name in _RESHAPES else ref

    # -- numbers

    def find_constant(self, name: str) -> Tensor | None:
        """The model's parameter or buffer of that name."""
        holder, _, key = name.rpartition(".")
        value: Any = getattr(self._model.get_submodule(holder), key, None)
        return value.data if isinstance(value, Tensor) else None

    def compute_number(self, by: Any) -> float | None:
        """A number, or a result that is one whatever the tokens are; None for others."""
        if not isinstance(by, Ref):
            return float(by)
        is_moving = by.node in self.trace.moving or self.find_sources(by)
        if is_moving or self.trace.shapes[by].numel() != 1:
            return None
        return self.trace.compute(by, {}, self.find_constant).item()

    def compute_table(self, ref: Ref) -> Tensor:
        """[L, N] of what positions alone give."""
        parts = [
            self.trace.compute(ref, {Ref(POSITIONS): positions[None]}, self.find_constant)
            for positions in self._list_positions()
        ]
        return torch.cat([part.reshape(NUM_TOKENS, -1) for part in parts])[: self._max_len]

    def find_activation(self, ref: Ref) -> str | None:
        """The name of our function that a node computes of its first argument."""
        node = self.trace.nodes[ref.node]
        if node.kind == "act":
            return find_activation(self._model.get_submodule(node.name))
        if node.kind != "call" or node.name not in ACTIVATIONS or node.function is None:
            return None
        function, others, named = node.function, node.args[1:], node.kwargs or {}
        return find_activation(lambda x: function(x, *others, **named))

    def _list_positions(self) -> list[Tensor]:
        every = torch.arange(-(-self._max_len // NUM_TOKENS) * NUM_TOKENS).clamp(max=self._max_len - 1)
        return list(every.split(NUM_TOKENS))

    # -- parts

    def run(self, source: Ref, ref: Ref, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """[T, N of `ref`] for x [T, N of `source`]; all at position 0 unless told."""
        shape = list(self.trace.shapes[source])
        if shape.count(NUM_TOKENS) != 1:
            raise NotTracedError("sizes that hide the tokens")
        place = shape.index(NUM_TOKENS)
        value = x.view(NUM_TOKENS, *shape[:place], *shape[place + 1 :]).movedim(0, place)
        at = torch.zeros(NUM_TOKENS, dtype=torch.int64) if positions is None else positions
        out = self.trace.compute(ref, {source: value, Ref(POSITIONS): at[None]}, self.find_constant)
        if list(out.shape).count(NUM_TOKENS) != 1:
            raise NotTracedError("sizes that hide the tokens")
        return out.movedim(list(out.shape).index(NUM_TOKENS), 0).reshape(NUM_TOKENS, -1)

    def find_choice(self, source: Ref, ref: Ref) -> tuple[Tensor, Tensor]:
        """(factors, indexes): which of the source's numbers each of `ref` is, times what, at position 0."""
        width = self._count_numbers(source)
        ones, counts = torch.ones(NUM_TOKENS, width), torch.arange(width).float().expand(NUM_TOKENS, width)
        factors, products = self.run(source, ref, ones)[0], self.run(source, ref, counts)[0]
        index = (products / factors).round()
        is_finite = factors.isfinite().all() and (factors != 0).all()
        if not (is_finite and torch.allclose(index * factors, products, 1e-6)):
            raise NotTracedError("more than a choice of a layer's outputs")
        return factors, index.long().clamp(0, width - 1)

    def find_turn(self, source: Ref, ref: Ref, index: Tensor) -> Turn:
        """How heads turn whose numbers are those of `index` [H, D] of the source."""
        matrix = self._find_matrix(source, ref, index)
        order = _find_order(matrix)
        parts = self.find_turning(source, ref)
        key = parts, tuple(order.tolist()), tuple(matrix.flatten().tolist())  # heads that turn alike share
        if key not in self._turns:
            half = len(order) // 2
            x = torch.zeros(NUM_TOKENS, self._count_numbers(source))
            x[:, index[0, order[:half]]] = 1
            rows = [self.run(source, ref, x, at)[:, : len(order)][:, order] for at in self._list_positions()]
            cos, sin = torch.cat(rows)[: self._max_len].float().split(half, dim=1)
            turn = Turn(order, cos.contiguous(), sin.contiguous())
            self._turns[key] = next(filter(turn.equals, self._turns.values()), turn)
        return self._turns[key]

    def _find_matrix(self, source: Ref, ref: Ref, index: Tensor) -> Tensor:
        """[D out, D in]: what a head becomes at position 1, all heads the same."""
        (heads, size), columns = index.shape, list[Tensor]()
        at_one = torch.ones(NUM_TOKENS, dtype=torch.int64)
        for places in torch.arange(size).split(NUM_TOKENS):
            x = torch.zeros(NUM_TOKENS, self._count_numbers(source))
            x[torch.arange(len(places)), index[:, places]] = 1
            out = self.run(source, ref, x, at_one).view(NUM_TOKENS, heads, size)[: len(places)]
            if (out != out[:, :1]).any():
                raise NotTracedError("heads that turn by other angles")
            columns.append(out[:, 0])
        return torch.cat(columns).t()

    def find_cap(self, source: Ref, ref: Ref) -> tuple[float, float | None]:
        """(factor, soft cap) of what is scaled, and then capped by a tanh where there is a cap."""
        x = torch.linspace(-90, 90, self._count_numbers(source)).expand(NUM_TOKENS, -1).contiguous()
        near, far = (
            self.run(source, ref, torch.full_like(x, each))[0, 0].item() / each for each in (_NEAR, _FAR)
        )
        cap = far * _FAR if far < near / 1e3 else None
        expected = x * near if cap is None else cap * torch.tanh(x * near / cap)
        if not torch.allclose(self.run(source, ref, x), expected, 1e-4, 1e-4):
            raise NotTracedError("logits that are more than scaled or capped")
        return 1.0 if abs(near - 1) < 1e-6 else near, cap

    def _count_numbers(self, ref: Ref) -> int:
        return self.trace.shapes[ref].numel() // NUM_TOKENS


def _find_order(matrix: Tensor) -> Tensor:
    """[D]: pairs that turn half a head apart, and between them what stays as it is."""
    size = len(matrix)
    off = matrix - torch.diag(matrix.diagonal())
    partner = off.abs().argmax(1)
    firsts = [i for i in range(size) if off[i, partner[i]] < 0]
    seconds, alone = [int(partner[i]) for i in firsts], [i for i in range(size) if not off[i].any()]
    middle = len(alone) // 2
    order = firsts + alone[:middle] + seconds + alone[middle:]
    if ((off != 0).sum(1) > 1).any() or sorted(order) != list(range(size)) or len(alone) % 2:
        raise NotTracedError("heads that do more than turn")
    return torch.tensor(order)
