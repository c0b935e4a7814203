"""KeptGrammars: what a worker keeps of the grammars that it has compiled, and the core's copy of the names.

Both see the same grammars in the same order, that of the rows that sample first, so the core knows without
being told which grammar will cost a compile.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

# Some 150 KB each for a JSON schema, and what is larger has a longer text.
MAX_KEPT_GRAMMARS = 256
MAX_KEPT_CHARACTERS = 1 << 19

Value = TypeVar("Value")


class KeptGrammars(Generic[Value]):
    """Grammar texts, each with a value; what was not used for longest goes first."""

    def __init__(self) -> None:
        self._values: OrderedDict[str, Value] = OrderedDict()
        self._num_characters = 0

    def __contains__(self, grammar: str) -> bool:
        return grammar in self._values

    def find(self, grammar: str) -> Value | None:
        """Its value, without using it; None if it is not kept."""
        return self._values.get(grammar)

    def use(self, grammar: str) -> Value | None:
        """Its value, which is now the last to go; None if it is not kept."""
        value = self._values.get(grammar)
        if value is not None:
            self._values.move_to_end(grammar)
        return value

    def keep(self, grammar: str, value: Value) -> None:
        """Keep one that is not kept, and let go of others; also of itself, if it is too long."""
        self._values[grammar] = value
        self._num_characters += len(grammar)
        while len(self._values) > MAX_KEPT_GRAMMARS or self._num_characters > MAX_KEPT_CHARACTERS:
            oldest, _ = self._values.popitem(last=False)
            self._num_characters -= len(oldest)

    def clear(self) -> None:
        """Forget all."""
        self._values.clear()
        self._num_characters = 0
