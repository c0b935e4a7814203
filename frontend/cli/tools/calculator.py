"""Arithmetic for a model: an expression is parsed, never run as code, and no number in it may grow far."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable

from ....ipc.errors import shorten

Number = int | float

MAX_LENGTH = 200  # characters of an expression
_MAX_BITS = 1000  # of an integer: 300 digits, about as far as a float goes
_ALLOWED = "numbers, + - * / // % ** and parentheses"
_CHARACTERS = re.compile(r"[-+*/%().0-9eE_\s]*")


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
