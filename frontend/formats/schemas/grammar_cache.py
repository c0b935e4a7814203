"""GrammarCache: grammars that were taken, by what they were made of."""

from __future__ import annotations

import msgspec

from ....ipc.errors import SamplingParamsError
from ....ipc.params.structured_outputs import StructuredOutputsParams
from ..grammars.rules import OutputRules

_MAX_KEPT = 128
# Of key and text; the few that are larger are compiled again. A worker keeps 4 MB of texts: what is known
# here is known there, too, where rows would wait for a compile.
_MAX_SIZE = 32 * 1024


class GrammarCache:
    """A bounded dict that threads may share: when it is full it is emptied."""

    def __init__(self) -> None:
        self._texts: dict[bytes, str] = {}

    def find(self, key: bytes) -> str | None:
        """The grammar made of this, None if it is not known."""
        return self._texts.get(key)

    def keep(self, key: bytes, text: str) -> None:
        """Remember a grammar that has been checked."""
        if len(self._texts) >= _MAX_KEPT:
            self._texts.clear()
        if len(key) + len(text) <= _MAX_SIZE:
            self._texts[key] = text


def make_key(
    params: StructuredOutputsParams | None, is_strict: bool = False, rules: OutputRules | None = None
) -> bytes:
    """What equal parameters have in common, whatever Python objects they hold. Raises SamplingParamsError."""
    key = b"" if rules is None else _encode(rules.tools_place, rules)
    if params is None:
        return key
    return key + _encode(f"structured_outputs.{params.kind}", (is_strict, *msgspec.structs.astuple(params)))


def _encode(place: str, value: object) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise SamplingParamsError(place, "a value", f"JSON ({error})") from None
