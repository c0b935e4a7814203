"""docs/features.md: the architectures that families read, as config.json and GGUF files name them."""

from __future__ import annotations

from ...frontend.models.families import ARCHITECTURES
from ...frontend.models.families.encoders import ENCODERS
from ...frontend.models.families.wrapped import WRAPPED_ARCHITECTURES
from ...frontend.models.gguf.architectures import GGUF_NAMES
from ..markdown import format_table


def render_models() -> str:
    """A table of decoders, and the names of the others."""
    rows = [(f"`{name}`", _code(GGUF_NAMES.get(name, ()))) for name in ARCHITECTURES]
    wrapped, encoders = _code(WRAPPED_ARCHITECTURES), _code(tuple(ENCODERS))
    return (
        f"{format_table(('decoder, in config.json', 'in a GGUF file'), rows)}\n"
        f"The text model alone is read of {wrapped}; requests with images or audio are refused.\n\n"
        f"Encoders: {encoders}.\n"
    )


def _code(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)
