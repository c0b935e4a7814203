"""GrammarCache: grammars that were taken, by what they were made of."""

from __future__ import annotations

import msgspec

from ...ipc.errors import SamplingParamsError
from ...ipc.structured_outputs import StructuredOutputsParams

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


def make_key(params: StructuredOutputsParams, is_strict: bool = False) -> bytes:
    """What equal parameters have in common, whatever Python objects they hold. Raises SamplingParamsError."""
    try:
        return msgspec.msgpack.encode((is_strict, *msgspec.structs.astuple(params)))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise SamplingParamsError(f"structured_outputs.{params.kind}", "a value", f"JSON ({error})") from None
