"""Bodies of Messages requests as conversations: what templates get, and what is refused by its place."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from quire.frontend.http.bodies.messages import MessagesRequest
from quire.frontend.http.bodies.parsing import parse_body
from quire.frontend.http.dialects.messages import make_conversation
from quire.frontend.http.dialects.table import ROUTES, check_request
from quire.frontend.http.errors import ApiError
from quire.frontend.http.options import ServerOptions
from quire.frontend.http.text_process.jobs import Conversation
from quire.frontend.tools import ToolChoice

LEAST: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"x": [1]}}
SCHEMA = {"type": "json_schema", "schema": {"type": "object"}}
TOOL = {"name": "f", "description": "It does.", "input_schema": {"type": "object", "properties": {}}}


def read(is_thinking: bool = True, **fields: Any) -> Conversation:
    request = parse_body(json.dumps(LEAST | fields).encode(), MessagesRequest)
    facts: Any = SimpleNamespace(tasks=("generate",))
    check_request(ROUTES["/v1/messages"], facts, request)
    serving: Any = SimpleNamespace(options=ServerOptions(), is_thinking=is_thinking)
    return make_conversation(serving, request)


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said, "cache_control": {"type": "ephemeral", "ttl": "5m"}}


def result(content: Any, call_id: str = "toolu_1", **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **fields}


def test_thoughts_calls_and_results_become_messages_of_their_own_in_order() -> None:
    other = CALL | {"id": "toolu_2", "caller": {"type": "direct"}}
    thoughts = {"type": "thinking", "thinking": "Hm.", "signature": "of anybody"}
    hidden = {"type": "redacted_thinking", "data": "xyz"}
    messages = [
        {"role": "user", "content": "Do it."},
        assistant(thoughts, hidden, text("I do."), CALL, other),
        user(
            text("And then?"),
            result([{"type": "text", "text": "1"}, {"type": "text", "text": "2"}]),
            result("broken", "toolu_2", is_error=True),
        ),
    ]
    asked, said, first, second, more = read(messages=messages, system=[text("Be"), text("good.")]).messages[
        1:
    ]
    assert (asked.role, asked.content) == ("user", "Do it.")
    assert (said.content, said.reasoning_content) == ("I do.", "Hm.")
    function = {"name": "f", "arguments": {"x": [1]}}
    assert said.tool_calls == [
        {"id": name, "type": "function", "function": function} for name in ("toolu_1", "toolu_2")
    ]
    assert (first.role, first.tool_call_id, first.content) == ("tool", "toolu_1", "1\n2")
    assert (second.role, second.tool_call_id, second.content) == ("tool", "toolu_2", "Error: broken")
    assert (more.role, more.content) == ("user", "And then?")


def test_results_without_text_are_no_turn_of_the_user_and_may_be_empty() -> None:
    messages = [LEAST["messages"][0], assistant(CALL), user(result(None)), assistant(CALL), user(result([]))]
    for content, expected in ((None, ""), ([], "")):
        messages[2] = user(result(content))
        found = read(messages=messages).messages
        assert [one.role for one in found] == ["user", "assistant", "tool", "assistant", "tool"]
        assert found[2].content == expected
        assert found[1].content is None


def test_turns_of_one_speaker_in_a_row_are_one() -> None:
    messages = [
        user(text("a"), text("b")),
        {"role": "user", "content": "c"},
        assistant(text("e")),
        assistant(text("f")),
    ]
    conversation = read(messages=messages)
    assert [(one.role, one.content) for one in conversation.messages] == [
        ("user", "a\nb\nc"),
        ("assistant", "e\nf"),
    ]
    assert conversation.continue_final_message
    assert not conversation.add_generation_prompt


def test_a_system_message_in_the_middle_is_told_by_the_user() -> None:
    system = {"role": "system", "content": "Begin."}
    later = {"role": "system", "content": [text("Be brief.")]}
    messages = [system, *LEAST["messages"], later, assistant(CALL), user(result("x")), later]
    reminder = "<system-reminder>\nBe brief.\n</system-reminder>"
    assert [(one.role, one.content) for one in read(messages=messages, system="Be good.").messages] == [
        ("system", "Be good.\nBegin."),
        ("user", f"Hi\n{reminder}"),
        ("assistant", None),
        ("tool", "x"),
        ("user", reminder),
    ]


def test_a_system_text_that_differs_in_each_request_is_left_out() -> None:
    system = [text("x-anthropic-billing-header: cc_version=2; cch=abc;"), text("Be good.")]
    assert read(system=system).messages[0].content == "Be good."
    assert [one.role for one in read(system=system[:1]).messages] == ["user"]


@pytest.mark.parametrize(
    ("choice", "expected", "parallel"),
    [
        (None, ToolChoice(), True),
        ({"type": "auto"}, ToolChoice(), True),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice(), False),
        ({"type": "any", "disable_parallel_tool_use": False}, ToolChoice("required"), True),
        ({"type": "tool", "name": "f"}, ToolChoice("required", frozenset(["f"])), True),
        ({"type": "none"}, ToolChoice("none"), True),
    ],
)
def test_tools_and_their_choice_are_told_in_the_words_of_all(
    choice: Any, expected: ToolChoice, parallel: bool
) -> None:
    cached = {"cache_control": {"type": "ephemeral"}, "eager_input_streaming": True, "type": "custom"}
    conversation = read(tools=[TOOL | cached, TOOL | {"name": "g", "strict": True}], tool_choice=choice)
    assert (conversation.choice, conversation.parallel) == (expected, parallel)
    assert [(tool.name, tool.strict) for tool in conversation.tools] == [("f", False), ("g", True)]
    assert conversation.tools[0].parameters == TOOL["input_schema"]


@pytest.mark.parametrize(
    ("fields", "variables", "budget", "effort"),
    [
        ({}, None, None, None),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}, None, None),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, {"enable_thinking": True}, None, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, {"enable_thinking": True}, 2000, None),
        ({"output_config": {"effort": "low"}}, None, None, "low"),
        ({"output_config": {"effort": "max"}}, None, None, "high"),
    ],
)
def test_thinking_becomes_what_templates_and_grammars_know(
    fields: dict[str, Any], variables: Any, budget: int | None, effort: str | None
) -> None:
    conversation = read(max_tokens=4000, **fields)
    assert conversation.variables == variables
    assert conversation.thinking_token_budget == budget
    assert conversation.reasoning_effort == effort
    assert read(False, max_tokens=4000, **fields).thinking_token_budget is None


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
            "output_config.format",
        ),
        ({"output_format": {"type": "json_schema", "schema": {"type": "object"}}}, "output_format"),
    ],
)
def test_a_schema_is_named_by_its_place(fields: dict[str, Any], place: str) -> None:
    source = read(**fields).format
    assert source is not None
    assert (source.params.json, source.place) == ({"type": "object"}, f"{place}.schema")


def test_what_changes_nothing_is_taken() -> None:
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}]
    taken: dict[str, Any] = {
        "metadata": {"user_id": "x"},
        "context_management": {"edits": edits},
        "cache_control": {"type": "ephemeral"},
        "betas": ["interleaved-thinking-2025-05-14"],
        "service_tier": "auto",
        "inference_geo": "eu",
        "speed": "fast",
        "mcp_servers": [],
        "container": None,
    }
    assert read(**taken) == read()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": [assistant(result("x"))]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "system", "content": [CALL]}]}, "messages[0].content[0].type"),
    ({"messages": [user(text("x"), CALL)]}, "messages[0].content[1].type"),
    ({"messages": [user({"type": "thinking", "thinking": "x"})]}, "messages[0].content[0].type"),
    ({"messages": [user({"type": "image", "source": {}})]}, "messages[0].content[0].type"),
    ({"messages": [user({"type": "document", "source": "x" * 100_000})]}, "messages[0].content[0].type"),
    ({"messages": [user(result([{"type": "image"}]))]}, "messages[0].content[0].content[0].type"),
    ({"messages": [user(result("x"))]}, "messages[0].content[0].tool_use_id"),
    ({"messages": [LEAST["messages"][0], assistant(CALL)]}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [user(*[text("x")] * 4097)]}, "messages.content"),
    ({"messages": []}, "messages"),
    ({"model": None}, "model"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"temperature": 1.5}, "temperature"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tool_choice": {"type": "any"}}, "tool_choice.type"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "all"}}, "tool_choice.type"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1023}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "between_tools"}}, "thinking.type"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort"),
    ({"output_config": {"format": SCHEMA}, "output_format": SCHEMA}, "output_format"),
    ({"output_format": {"type": "json_schema", "schema": {}}}, "output_format.schema"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
    ({"container": "c"}, "container"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ({"nothing": 1}, "nothing"),
    ({"messages": [assistant({**CALL, "nothing": 1})]}, "messages[0].content[0].nothing"),
]


@pytest.mark.parametrize(("fields", "field"), REFUSED)
def test_what_cannot_be_done_is_refused_by_its_place(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(**fields)
    assert (caught.value.param, caught.value.status) == (field, 400)


def test_a_block_of_an_unknown_kind_is_named_however_large_the_body_is() -> None:
    for size in (10, 100_000):
        with pytest.raises(ApiError, match="type='image': text, thinking"):
            read(messages=[user({"type": "image", "source": "x" * size})])
