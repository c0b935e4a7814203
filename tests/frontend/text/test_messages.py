"""Messages and tools reach a template as transformers' templates expect; others are refused by field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from quire.frontend.text.chat_template import ChatTemplate
from quire.frontend.text.messages import as_template_tools, check_messages
from quire.frontend.tools import Tool
from quire.ipc.errors import PromptError
from refusals import Refusal, refusals

USER = {"role": "user", "content": "How warm is it?"}


def call(arguments: Any = '{"city": "Rome"}', **fields: Any) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}} | fields


def turn(*calls: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)} | fields


def result(call_id: str | None = "call_1", content: Any = "20") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def check(*messages: Any) -> list[dict[str, Any]]:
    return check_messages(messages, lambda: False)


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ('{"city": "Rome"}', {"city": "Rome"}),
        ({"city": "Rome"}, {"city": "Rome"}),
        ("", {}),
        (None, {}),
        ('{"big": 123456789012345678901234567890}', {"big": 123456789012345678901234567890}),
    ],
)
def test_arguments_of_past_calls_become_objects(given: Any, seen: Any):
    messages = [USER, turn(call(given)), result()]
    checked = check(*messages)
    assert checked[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": seen}
    assert messages[1] == turn(call(given)), "the caller's are left as they were"


def test_a_turn_with_calls_has_a_content_that_is_none_unless_it_has_text():
    checked = check(
        USER, turn(call()), result(), turn(call(), content="So"), {"role": "tool", "content": "1"}
    )
    assert [one.get("content", "missing") for one in checked] == [USER["content"], None, "20", "So", "1"]
    del (without := turn(call()))["content"]
    assert check(USER, without)[1]["content"] is None


def test_results_may_be_of_any_call_before_them():
    check(USER, turn(call()), turn(call(id="call_2")), result("call_1"), result("call_2"))


def test_a_call_without_an_outer_object_is_left_as_it_is():
    checked = check(
        USER, turn({"name": "f", "arguments": "{}"}), {"role": "tool", "name": "f", "content": "1"}
    )
    assert checked[1]["tool_calls"] == [{"name": "f", "arguments": {}}]


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_thoughts_of_past_turns_have_all_names(name: str):
    said = check(USER, {"role": "assistant", "content": "Hi", name: "Hm."})[1]
    names = ("reasoning", "reasoning_content", "thinking")
    assert said == {"role": "assistant", "content": "Hi"} | dict.fromkeys(names, "Hm.")


@refusals("messages")
def test_calls_and_results_that_do_not_fit_are_refused_by_field(refusal: Refusal):
    refusal.check(lambda messages: check(*messages))


TOOLS = [Tool("f", "What it does.", {"type": "object", "properties": {"x": {}}}, strict=True), Tool("g")]
SHOWS_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[0].content }}"


def test_a_template_is_shown_tools_in_their_usual_form():
    shown = [
        {
            "type": "function",
            "function": {
                "name": "f",
                "description": "What it does.",
                "parameters": {"type": "object", "properties": {"x": {}}},
            },
        },
        {"type": "function", "function": {"name": "g", "parameters": {"type": "object", "properties": {}}}},
    ]
    assert as_template_tools(TOOLS) == shown
    template = ChatTemplate(SHOWS_TOOLS, {})
    assert template.render([USER], tools=TOOLS) == json.dumps(shown) + USER["content"]
    assert template.render([USER]) == USER["content"]


@pytest.mark.parametrize("source", ["{{ messages[0].content }}", "{% if tools %}Tools!{% endif %}"])
def test_a_template_that_shows_no_tools_is_found_by_rendering(source: str):
    template = ChatTemplate(source, {})
    with pytest.raises(PromptError, match="shows none") as caught:
        template.render([USER], tools=TOOLS)
    assert caught.value.field == "tools"


def test_a_template_that_refuses_what_is_tried_may_show_tools():
    refusal = "{% if messages | length < 2 %}{{ raise_exception('too short') }}{% endif %}"
    source = refusal + "{{ tools[0].function.name }}"
    assert ChatTemplate(source, {}).render([USER, USER], tools=TOOLS) == "f"


def test_what_clients_dump_with_an_answer_is_left_out():
    empty: dict[str, Any] = {"tool_calls": [], "function_call": None, "audio": {}, "annotations": []}
    echoed = {"refusal": None, "parsed": {"a": 1}, "provider_specific_fields": {}, "cache_control": {}}
    dumped = {"role": "assistant", "content": "x", "name": "", "reasoning": "", **empty, **echoed}
    assert check(USER, dumped) == [USER, {"role": "assistant", "content": "x"}]
    assert check({"role": "assistant", "content": None, "refusal": "No."})[0]["content"] == "No."


@pytest.mark.parametrize("takes_parts", [False, True])
def test_parts_of_every_text_type_are_plain_texts(takes_parts: bool):
    parts = [{"type": kind, "text": "x", "annotations": []} for kind in ("text", "input_text", "output_text")]
    (message,) = check_messages([{"role": "user", "content": parts}], lambda: takes_parts)
    assert message["content"] == ([{"type": "text", "text": "x"}] * 3 if takes_parts else "x\nx\nx")


@refusals("message_parts")
def test_what_is_no_text_is_refused_by_its_field(refusal: Refusal):
    refusal.check(lambda fields: check({"role": "assistant", "content": "x"} | fields))


OF_ROLES = "{% for m in messages %}{% if m['role'] == 'ipython' %}!{% endif %}{{ m['content'] }}{% endfor %}"


def test_a_role_that_neither_chats_nor_the_template_know_is_refused():
    template = ChatTemplate(OF_ROLES, {})
    for role in ("system", "developer", "user", "assistant", "ipython"):
        assert "x" in template.render([{"role": role, "content": "x"}])
    for role, said in (
        ("sytem", "did you mean 'system'"),
        ("role", "one of system"),
        ("r" * 10**6, "one of"),
    ):
        with pytest.raises(PromptError, match=rf"^messages\[0\]\.role='r?.*: expected .*{said}"):
            template.render([{"role": role, "content": "x"}])
