"""The tools of agents that the tests are: what is offered, and what a call returns. Imports no client."""

from __future__ import annotations

import operator
from typing import Any

QUESTION = "What is 1234 plus 2345?"
RESULT = "3579"
TWO_QUESTIONS = "What is 1234 plus 2345 and what is the capital of France?"
EXPRESSION: dict[str, Any] = {
    "type": "object",
    "properties": {"expression": {"type": "string"}},
    "required": ["expression"],
    "additionalProperties": False,
}
KEY: dict[str, Any] = {
    "type": "object",
    "properties": {"key": {"type": "string"}},
    "required": ["key"],
    "additionalProperties": False,
}
DESCRIPTIONS = {"calculator": "Calculates an expression.", "lookup": "Looks up a fact."}
SCHEMAS = {"calculator": EXPRESSION, "lookup": KEY}
_SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def run_tool(name: str, arguments: dict[str, str]) -> str:
    """What the call returns."""
    return {"calculator": calculator, "lookup": lookup}[name](**arguments)


def calculator(expression: str) -> str:
    """Calculates an expression."""
    left, sign, right = expression.split()
    return str(_SIGNS[sign](int(left), int(right)))


def lookup(key: str) -> str:
    """Looks up a fact."""
    return {"capital of France": "Paris"}.get(key, "unknown")
