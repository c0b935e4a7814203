"""response_format, structured_outputs and text.format: the grammar that is sent, and 400 with the place."""

from __future__ import annotations

import json
from typing import Any

import pytest
from grammar_judge import accepts
from openai_fakes import AsgiClient, FakeLLM

CHAT, COMPLETION, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
    COMPLETION: {"prompt": "Hi"},
    RESPONSES: {"input": "Hi"},
}
STRICT: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
COUNTS = STRICT | {"properties": {"a": {"type": "object", "additionalProperties": {"type": "integer"}}}}
OPEN: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}


def schema_format(schema: Any, **fields: Any) -> dict[str, Any]:
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **fields}}
    }


def text_format(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema, **fields}}}


TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": OPEN, "end": "</f>"}],
    "triggers": ["<f>"],
}


@pytest.mark.parametrize(
    ("path", "fields", "yes", "no"),
    [
        (CHAT, schema_format(STRICT, strict=True), '{"a": 1}', "{}"),
        (CHAT, schema_format(COUNTS, strict=True), '{"a": {"b": 1}}', '{"a": {"b": "1"}}'),
        (CHAT, schema_format(OPEN, strict=None, description="any"), '{"b": 1}', '{"a": "1"}'),
        (CHAT, {"response_format": {"type": "json_object"}}, '{"a": [1]}', "[1]"),
        (CHAT, {"response_format": TAG}, 'so <f>{"a": 1}</f>', '<f>{"a": "1"}</f>'),
        (CHAT, {"structured_outputs": {"choice": ["yes", "no"]}}, "no", "maybe"),
        (CHAT, {"structured_outputs": {"json": json.dumps(STRICT)}, "stream": True}, '{"a":1}', "{}"),
        (
            CHAT,
            {"structured_outputs": {"regex": "[0-9]+"}, "response_format": {"type": "text"}, "n": 2},
            "12",
            "a",
        ),
        (COMPLETION, {"structured_outputs": {"grammar": 'start: "a"+'}, "echo": True}, "aa", "b"),
        (COMPLETION, schema_format(STRICT), '{"a":1}', "{}"),
        (RESPONSES, text_format(STRICT, strict=True), '{"a":1}', "{}"),
        (RESPONSES, {"text": {"format": {"type": "json_object"}}}, "{}", "[]"),
    ],
    ids=str,
)
async def test_a_format_becomes_the_grammar_of_the_request(
    llm: FakeLLM, client: AsgiClient, path: str, fields: dict[str, Any], yes: str, no: str
) -> None:
    answer = await client.post(path, {**LEAST[path], **fields})
    assert answer.status == 200, answer.body
    (call,) = llm.calls
    assert [accepts(call.grammar, text) for text in (yes, no)] == [True, False]
