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

_CAPITALS = {
    "argentina": "Buenos Aires",
    "australia": "Canberra",
    "austria": "Vienna",
    "belgium": "Brussels",
    "brazil": "Brasilia",
    "canada": "Ottawa",
    "china": "Beijing",
    "denmark": "Copenhagen",
    "egypt": "Cairo",
    "finland": "Helsinki",
    "france": "Paris",
    "germany": "Berlin",
    "greece": "Athens",
    "india": "New Delhi",
    "italy": "Rome",
    "japan": "Tokyo",
    "kenya": "Nairobi",
    "mexico": "Mexico City",
    "norway": "Oslo",
    "poland": "Warsaw",
    "portugal": "Lisbon",
    "spain": "Madrid",
    "sweden": "Stockholm",
    "turkey": "Ankara",
}
FACTS = {f"capital of {country}": city for country, city in _CAPITALS.items()} | {
    "boiling point of water": "100 degrees",
    "currency of japan": "yen",
    "currency of poland": "zloty",
    "height of mount everest": "8849 m",
    "length of the nile": "6650 km",
    "number of planets": "8",
    "speed of light": "299792458 m/s",
    "speed of sound": "343 m/s",
}
_MAX_LENGTH = 200


def find_fact(key: str) -> str:
    """The fact of that name, in upper or lower case. Raises ValueError, with a hint, where there is none."""
    name = " ".join(key[:_MAX_LENGTH].casefold().removeprefix("the ").rstrip("?. ").split())
    if name not in FACTS:
        raise ValueError(f"nothing is known of {shorten(key)}{did_you_mean(name, FACTS)}")
    return FACTS[name]


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
