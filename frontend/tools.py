"""Tools that a request offers, and what it says of their use; the same for every API."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Tool(msgspec.Struct, frozen=True):
    """A function that the model may call. parameters: the JSON schema of its arguments, an object.

    strict: arguments have to satisfy the schema also where the model is free to call or not.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False


class ToolChoice(msgspec.Struct, frozen=True):
    """Whether tools are called: not at all, as the model likes, or at least one.

    names: the only ones that may be called; None for all that are offered.
    """

    mode: Literal["none", "auto", "required"] = "auto"
    names: frozenset[str] | None = None
