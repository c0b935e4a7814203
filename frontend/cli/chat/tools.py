"""The tools that ship with `quire chat`: what a model is told of each, and what a call of it does.

A call never raises: what is wrong with it is its result, for the model to read. An expression is parsed,
never run as code, and no number in it may grow far.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from ....ipc.errors import InputError, did_you_mean, shorten
from ...events import ToolCall
from ...tools import Tool

Number = int | float

MAX_LENGTH = 200  # characters of an expression
_MAX_BITS = 1000  # of an integer: 300 digits, about as far as a float goes
_ALLOWED = "numbers, + - * / // % ** and parentheses"
_CHARACTERS = re.compile(r"[-+*/%().0-9eE_\s]*")
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


class CalculatorError(ValueError):
    """An expression without a value; the text is for the model."""


def calculate(expression: str) -> str:
    """The value of an arithmetic expression such as '(12 + 30) * 2', as text. Raises CalculatorError.

    Integers are exact; other numbers have 12 digits.
    """
    if len(expression) > MAX_LENGTH:
        raise CalculatorError(f"at most {MAX_LENGTH} characters make an expression, not {len(expression)}")
    if _CHARACTERS.fullmatch(expression) is None:
        raise CalculatorError(f"{shorten(expression)} has more in it than {_ALLOWED}")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except SyntaxError:
        raise CalculatorError(f"{shorten(expression)} is not an expression of {_ALLOWED}") from None
    try:
        value = _compute(tree.body)
    except ZeroDivisionError:
        raise CalculatorError("division by zero") from None
    except OverflowError:
        raise CalculatorError("a number is too large") from None
    return str(value) if isinstance(value, int) else f"{value:.12g}"


def _compute(node: ast.expr) -> Number:
    match node:
        case ast.Constant(int() | float() as value):
            return _check(value)
        case ast.UnaryOp(op, operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_compute(operand))
        case ast.BinOp(left, op, right) if type(op) in _BINARY:
            return _check(_BINARY[type(op)](_compute(left), _compute(right)))
        case _:
            raise CalculatorError(f"{shorten(ast.unparse(node))} is not one of {_ALLOWED}")


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > 2 * _MAX_BITS:
        raise OverflowError  # before it takes long
    return base**exponent


def _check(value: Number | complex) -> Number:
    if isinstance(value, complex):
        raise CalculatorError("the result is not a real number")
    if value.bit_length() > _MAX_BITS if isinstance(value, int) else not math.isfinite(value):
        raise OverflowError
    return value


_UNARY: dict[type[ast.unaryop], Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}


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
