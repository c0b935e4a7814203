"""Items of a conversation -> messages, and what is refused with its place."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from quire.frontend.http.dialects.responses_items import make_messages, read_items
from quire.frontend.http.errors import ApiError

CALL: dict[str, Any] = {
    "type": "function_call",
    "id": "fc-1",
    "call_id": "call_a",
    "name": "lookup",
    "arguments": '{"key": "x"}',
    "status": "completed",
}
RESULT: dict[str, Any] = {"type": "function_call_output", "call_id": "call_a", "output": "42"}
THOUGHTS: dict[str, Any] = {
    "type": "reasoning",
    "id": "rs-1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "Look it up."}],
    "encrypted_content": None,
}


def render(given: Any, instructions: str | None = None, num_stored: int = 0) -> list[dict[str, Any]]:
    items = make_messages(instructions, read_items(given), num_stored)  # type: ignore[arg-type]
    return [msgspec.to_builtins(message) for message in items]


def test_thoughts_text_and_calls_of_one_turn_are_one_message() -> None:
    said = {
        "type": "message",
        "id": "msg-1",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
    }
    messages = render([{"role": "user", "content": "Hi"}, THOUGHTS, said, CALL, RESULT, THOUGHTS, said])
    function = {"name": "lookup", "arguments": '{"key": "x"}'}
    assert messages == [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Look it up.",
            "tool_calls": [{"id": "call_a", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "42", "tool_call_id": "call_a"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Look it up."},
    ]


def test_a_turn_of_calls_alone_has_no_text_and_one_of_thoughts_alone_an_empty_one() -> None:
    assert "content" not in render([CALL, CALL | {"call_id": "call_b"}, RESULT])[0]
    assert len(render([CALL, CALL | {"call_id": "call_b"}])[0]["tool_calls"]) == 2
    assert render([THOUGHTS])[0]["content"] == ""


def test_a_call_that_was_cut_off_is_no_part_of_the_conversation() -> None:
    cut = CALL | {"arguments": '{"key', "status": "incomplete"}
    assert render([{"role": "user", "content": "Hi"}, cut]) == [{"role": "user", "content": "Hi"}]
    with pytest.raises(ApiError):
        render([cut, RESULT])


def test_what_the_operator_and_developers_say_at_the_beginning_is_one_system_message() -> None:
    developer = {"role": "developer", "content": [{"type": "input_text", "text": "Be kind."}]}
    messages = render([developer, {"role": "user", "content": "Hi"}, developer], "Be brief.")
    assert [(one["role"], one["content"]) for one in messages] == [
        ("system", "Be brief.\n\nBe kind."),
        ("user", "Hi"),
        ("system", "Be kind."),
    ]
    assert render("Hi") == [{"role": "user", "content": "Hi"}]


def test_parts_stay_parts_and_a_summary_stands_for_thoughts_without_content() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    summary = THOUGHTS | {"content": None, "summary": [{"type": "summary_text", "text": "In short"}]}
    messages = render([{"role": "user", "content": parts}, summary, CALL, RESULT | {"output": parts}])
    for content in (messages[0]["content"], messages[2]["content"]):
        assert [(part["type"], part["text"]) for part in content] == [("text", "a"), ("text", "b")]
    assert messages[1]["reasoning_content"] == "In short"


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ([], "input"),
        ([{"type": "local_shell_call", "action": {}}], "input[0].type"),
        ([{"role": "user", "content": "Hi"}, {"role": "tool", "content": "x"}], "input[1].role"),
        ([{"role": "user", "content": [{"type": "input_image"}]}], "input[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0].text"),
        ([{"role": "user", "content": "Hi", "name": "x"}], "input[0].name"),
        ([CALL, RESULT | {"output": [{"type": "input_file"}]}], "input[1].output[0].type"),
        ([RESULT], "input[0].call_id"),
        ([RESULT, CALL], "input[0].call_id"),
        ([CALL, RESULT | {"call_id": "call_b"}], "input[1].call_id"),
        ([CALL | {"arguments": '{"key": '}], "input[0].arguments"),
        ([CALL | {"arguments": "[1]"}], "input[0].arguments"),
        ([{"type": "function_call", "name": "x", "arguments": "{}"}], "input[0].call_id"),
        ([THOUGHTS | {"content": None, "encrypted_content": "gAAA"}], "input[0].encrypted_content"),
    ],
)
def test_an_item_that_cannot_be_read_is_refused_with_its_place(given: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        render(given)
    assert (caught.value.status, caught.value.param) == (400, param), caught.value


def test_places_count_from_the_requests_own_items() -> None:
    with pytest.raises(ApiError) as caught:
        render([{"role": "user", "content": "Hi"}, RESULT], num_stored=1)
    assert caught.value.param == "input[0].call_id"
