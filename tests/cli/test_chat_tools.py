"""The chat's own tools: what a call gives, and that a bad one is told to the model instead of raised."""

from __future__ import annotations

import json

import pytest
from quire.frontend.cli.chat.tools import CALCULATOR, LOOKUP, NAMES, find_tools, run_call
from quire.frontend.events import ToolCall
from quire.ipc.errors import InputError

BOTH = [CALCULATOR, LOOKUP]


def call(name: str, **arguments: object) -> str:
    return run_call(ToolCall("call_1", name, json.dumps(arguments)), BOTH)


def test_tools_are_found_by_name_in_the_order_given_and_each_once() -> None:
    assert find_tools("lookup, calculator,lookup") == [LOOKUP, CALCULATOR]
    assert {tool.name for tool in find_tools(",".join(NAMES))} == set(NAMES)


@pytest.mark.parametrize(
    ("names", "error"),
    [("calculater", "one of calculator, lookup, did you mean 'calculator'"), ("", "tools=''")],
)
def test_an_unknown_tool_is_refused_with_the_known_ones(names: str, error: str) -> None:
    with pytest.raises(InputError, match=error):
        find_tools(names)


def test_calls_give_their_results() -> None:
    assert call("calculator", expression="12 + 30") == "42"
    assert call("lookup", key="The capital of  France?") == "Paris"


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("calculator", '{"expression": "1 / 0"}', "error: division by zero"),
        ("calculator", '{"expression": 3}', "error: Expected `str`, got `int` - at `$.expression`"),
        ("calculator", "{}", "error: Object missing required field `expression`"),
        ("calculator", '{"expression": "1", "x": 2}', "error: Object contains unknown field `x`"),
        ("calculator", '{"expression": "1', "error: Input data was truncated"),
        ("lookup", '{"key": "capital of Frence"}', "error: nothing is known of 'capital of Frence', did you"),
        ("weather", "{}", "error: no tool 'weather' is offered"),
    ],
)
def test_what_is_wrong_with_a_call_is_its_result(name: str, arguments: str, error: str) -> None:
    assert run_call(ToolCall("call_1", name, arguments), BOTH).startswith(error)


def test_a_tool_that_was_not_offered_is_not_run() -> None:
    assert run_call(ToolCall("call_1", "calculator", '{"expression": "1"}'), [LOOKUP]).startswith(
        "error: no tool"
    )
