"""response_format, structured_outputs and text.format: the grammar that is sent, and 400 with the place."""

from __future__ import annotations

import json
from typing import Any

import pytest
from grammar_judge import accepts
from openai_fakes import AsgiClient, FakeLLM, run_with_app
from quire.frontend.formats.schemas import compiler
from quire.frontend.http.serving import Serving

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
def test_a_format_becomes_the_grammar_of_the_request(path: str, fields: dict[str, Any], yes: str, no: str):
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        answer = await client.post(path, {**LEAST[path], **fields})
        assert answer.status == 200, answer.body
        (call,) = llm.calls
        assert [accepts(call.grammar, text) for text in (yes, no)] == [True, False]

    run_with_app(scenario)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {}),
        (CHAT, {"response_format": {"type": "text"}}),
        (CHAT, {"response_format": None, "structured_outputs": None}),
        (RESPONSES, {"text": {"format": {"type": "text"}}}),
        (RESPONSES, {"text": {}}),
    ],
    ids=str,
)
def test_a_request_for_any_text_has_no_grammar(path: str, fields: dict[str, Any]):
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        assert (await client.post(path, {**LEAST[path], **fields})).status == 200
        assert llm.calls[0].grammar == ""

    run_with_app(scenario)


IN_SCHEMA = "response_format.json_schema.schema"
UNNAMED = {"type": "json_schema", "json_schema": {"schema": STRICT}}
NESTED = {**STRICT, "properties": {"a": OPEN}}


@pytest.mark.parametrize(
    ("path", "fields", "param", "said"),
    [
        (
            CHAT,
            schema_format({"properties": {"x": {"not": {}}}}),
            f"{IN_SCHEMA}.properties.x.not",
            "honoured",
        ),
        (CHAT, schema_format({"minimun": 1}), f"{IN_SCHEMA}.minimun", "did you mean 'minimum'"),
        (CHAT, schema_format({"pattern": "(?=a)"}), IN_SCHEMA, "look-around"),
        (CHAT, schema_format({}), IN_SCHEMA, "not empty"),
        (CHAT, schema_format(OPEN, strict=True), f"{IN_SCHEMA}.additionalProperties", "false with strict"),
        (CHAT, schema_format(STRICT | {"required": []}, strict=True), f"{IN_SCHEMA}.required", "also 'a'"),
        (CHAT, schema_format({"type": "array"}, strict=True), f"{IN_SCHEMA}.type", "'object'"),
        (
            CHAT,
            schema_format(NESTED, strict=True),
            f"{IN_SCHEMA}.properties.a.additionalProperties",
            "strict",
        ),
        (CHAT, schema_format(STRICT, name="a b"), "response_format.json_schema.name", "regex"),
        (CHAT, {"response_format": UNNAMED}, "response_format.json_schema.name", "required"),
        (CHAT, schema_format(STRICT, strictt=True), "response_format.json_schema.strictt", "no such field"),
        (
            CHAT,
            {"response_format": TAG | {"triggers": ["x"]}},
            "response_format.structures[0].begin",
            "triggers",
        ),
        (CHAT, {"structured_outputs": {}}, "structured_outputs", "exactly one of"),
        (CHAT, {"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed group"),
        (CHAT, {"structured_outputs": {"regex": 3}}, "structured_outputs.regex", "expected"),
        (CHAT, {"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp", "no such field"),
        (CHAT, schema_format(OPEN) | {"structured_outputs": {"regex": "a"}}, "structured_outputs", "beside"),
        (COMPLETION, {"structured_outputs": {"regex": "a" * 300_000}}, "structured_outputs.regex", "262144"),
        (
            COMPLETION,
            {"structured_outputs": {"regex": "a" * 2_000_000}},
            "structured_outputs.regex",
            "1048576",
        ),
        (RESPONSES, text_format({"if": {}}), "text.format.schema.if", "honoured"),
        (RESPONSES, text_format(OPEN, strict=True), "text.format.schema.additionalProperties", "strict"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_format_that_cannot_be_followed_is_refused_at_its_place(
    path: str, fields: dict[str, Any], param: str, said: str
):
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        answer = await client.post(path, {**LEAST[path], **fields})
        assert answer.status == 400, answer.body
        assert answer.error["param"] == param, answer.body
        assert said in answer.error["message"]
        assert llm.calls == []

    run_with_app(scenario)


def test_a_response_repeats_its_format():
    async def scenario(_llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        answer = await client.post(RESPONSES, LEAST[RESPONSES] | text_format(STRICT, strict=True))
        given = text_format(STRICT, strict=True)["text"]["format"]
        assert json.loads(answer.body)["text"]["format"].items() >= given.items()
        answer = await client.post(RESPONSES, LEAST[RESPONSES])
        assert json.loads(answer.body)["text"] == {"format": {"type": "text"}}

    run_with_app(scenario)


def test_a_format_that_was_taken_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch):
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        body = {**LEAST[CHAT], **schema_format(STRICT)}
        assert (await client.post(CHAT, body)).status == 200
        monkeypatch.setattr(compiler, "make_grammar_text", None)
        assert (await client.post(CHAT, body)).status == 200
        assert llm.calls[0].grammar == llm.calls[1].grammar

    run_with_app(scenario)


def test_the_schema_of_the_api_has_the_formats():
    async def scenario(_llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        answer = await client.get("/openapi.json")
        schemas = json.loads(answer.body)["components"]["schemas"]
        assert {
            "JsonSchemaFormat",
            "JsonSchema",
            "StructuredOutputsFields",
            "ResponsesText",
        } <= schemas.keys()

    run_with_app(scenario)
