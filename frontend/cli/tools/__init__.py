"""The tools that ship with `quire chat`: what a model is told of each, and what a call of it does.

A call never raises: what is wrong with it is its result, for the model to read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from ....ipc.errors import InputError, did_you_mean, shorten
from ...output_formats.events import ToolCall
from ...output_formats.tools import Tool
from .calculator import calculate
from .lookup import find_fact


class _Calculation(msgspec.Struct, forbid_unknown_fields=True):
    expression: str


class _Fact(msgspec.Struct, forbid_unknown_fields=True):
    key: str


class _Offer(NamedTuple):
    tool: Tool
    arguments: type[msgspec.Struct]
    run: Callable[[Any], str]  # raises ValueError with a text for the model


def _define(name: str, description: str, parameter: str, meaning: str) -> Tool:
    """A tool of one parameter, a text."""
    schema = {
        "type": "object",
        "properties": {parameter: {"type": "string", "description": meaning}},
        "required": [parameter],
        "additionalProperties": False,
    }
    return Tool(name, description, schema)


# The pocket model has learned these names and descriptions (tools/pocket).
CALCULATOR = _define("calculator", "Calculates an expression.", "expression", "such as 12 + 30")
LOOKUP = _define("lookup", "Looks up a fact.", "key", "such as capital of France")
_OFFERS = {
    "calculator": _Offer(CALCULATOR, _Calculation, lambda given: calculate(given.expression)),
    "lookup": _Offer(LOOKUP, _Fact, lambda given: find_fact(given.key)),
}
NAMES = tuple(_OFFERS)


def find_tools(names: str) -> list[Tool]:
    """Those of a list such as 'calculator,lookup', each once. Raises InputError for an unknown name."""
    given = [name.strip() for name in names.split(",")]
    for name in given:
        if name not in _OFFERS:
            raise InputError("tools", name, f"one of {', '.join(NAMES)}{did_you_mean(name, NAMES)}")
    return [_OFFERS[name].tool for name in dict.fromkeys(given)]


def run_call(call: ToolCall, offered: Sequence[Tool]) -> str:
    """The result of a call, or 'error: ' and what is wrong with it."""
    if call.name not in [tool.name for tool in offered]:
        return f"error: no tool {shorten(call.name)} is offered"
    offer = _OFFERS[call.name]
    try:
        return offer.run(msgspec.json.decode(call.arguments, type=offer.arguments))
    except ValueError as error:  # msgspec's errors are ValueErrors, too
        return f"error: {error}"
