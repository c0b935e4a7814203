"""RankCuts: which part of each weight a rank of a tensor parallel group has.

Projections with whose results each rank goes on alone (queries, keys, values, gate, up), and that to logits,
are cut by outputs, rows of the weight; those that follow (attention's output, down) are cut by inputs, its
columns: what they give are terms of a sum.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...ipc.model_spec import AttentionSpec
from ..weights import WHOLE, Cut


@dataclass(frozen=True, slots=True)
class RankCuts:
    """The cuts of one rank. Sizes are the whole model's, which `size` divides; if it is 1, all is WHOLE."""

    rank: int = 0
    size: int = 1

    def take_columns(self, count: int) -> Cut:
        """Its share of `count` inputs."""
        return WHOLE if self.size == 1 else Cut(columns=self._share(count))

    def take_rows(self, *counts: int) -> Cut:
        """Its share of each of several projections, with so many outputs, that lie one after the other."""
        starts = [sum(counts[:index]) for index in range(len(counts))]
        pairs = zip(counts, starts, strict=True)
        return self._rows(*(_shift(self._share(count), start) for count, start in pairs))

    def take_heads(self, spec: AttentionSpec) -> Cut:
        """Its heads of queries, and those of keys and values that they need."""
        keys, first = self._keys(spec), spec.query_size
        starts = (first, first + spec.kv_size)
        kv = [_shift(rows, start) for start in starts for rows in keys]
        return self._rows(self._share(spec.query_size), *kv)

    def take_key_heads(self, spec: AttentionSpec) -> Cut:
        """Its heads of keys alone."""
        return self._rows(*self._keys(spec))

    def is_first_of_keys(self, spec: AttentionSpec) -> bool:
        """Whether no rank before this one has its heads of keys."""
        return self.rank == 0 or self._keys(spec) != RankCuts(self.rank - 1, self.size)._keys(spec)

    def take_tokens(self, vocab_size: int) -> Cut:
        """Its part of the vocabulary, which need not divide."""
        return self._rows(self._share(vocab_size))

    def _keys(self, spec: AttentionSpec) -> list[range]:
        heads, size = spec.find_rank_heads(self.rank, self.size), spec.head_size
        return [range(head * size, (head + 1) * size) for head in heads]

    def _share(self, count: int) -> range:
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def _rows(self, *rows: range) -> Cut:
        return WHOLE if self.size == 1 else Cut(rows)


def _shift(rows: range, by: int) -> range:
    return range(rows.start + by, rows.stop + by)
