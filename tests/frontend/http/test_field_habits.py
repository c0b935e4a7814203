"""What clients of other servers send and look for: harmless and unknown fields, null, names, small routes."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from openai_fakes import AsgiClient, FakeLLM, run_with_app
from quire.frontend.http.bodies.responses import ResponsesRequest
from quire.frontend.http.bodies.schema import SilentFields
from quire.frontend.http.dialects.chat import ChatCompletionRequest
from quire.frontend.http.dialects.completions import CompletionRequest
from quire.frontend.http.options import ServerOptions
from quire.frontend.http.serving import Serving
from quire.ipc.errors import RequestFailedError
from tool_template import TEMPLATE

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES},
    COMPLETIONS: {"prompt": "Hi"},
    RESPONSES: {"input": "Hi"},
}
KINDS = {CHAT: ChatCompletionRequest, COMPLETIONS: CompletionRequest, RESPONSES: ResponsesRequest}
IGNORING = ServerOptions(unknown_fields="ignore")


@pytest.mark.parametrize("path", BODIES)
def test_a_field_that_is_null_is_as_if_it_were_not_there(path: str) -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        absent = {name: None for name in KINDS[path].__struct_fields__ if name not in BODIES[path]}
        plain, nulls = [(await client.post(path, BODIES[path] | more)).json for more in ({}, absent)]
        assert nulls.keys() == plain.keys()
        assert nulls["usage"] == plain["usage"]
        first, second = (msgspec.structs.asdict(call.params) for call in llm.calls)
        assert first == second

    run_with_app(scenario)


@pytest.mark.parametrize("path", BODIES)
def test_an_unknown_field_that_is_null_is_as_absent_at_any_depth(path: str) -> None:
    tool = {"type": "function", "function": {"name": "f", "new": None}, "newer": None}
    if path == RESPONSES:
        tool = {
            "type": "function",
            "name": "f",
            "parameters": {"type": "object", "default": None},
            "new": None,
        }
    said = {"role": "user", "content": [{"type": "input_text" if path == RESPONSES else "text", "text": "x"}]}
    deep = [said | {"new": None}, {"role": "user", "content": [said["content"][0] | {"new": None}]}] * 20
    body = BODIES[path] | {"moderation": None, "other": None, "stop": None}
    if path != COMPLETIONS:
        body |= {"tools": [tool], "input" if path == RESPONSES else "messages": deep}

    async def scenario(_llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        answer = await client.post(path, body)
        assert answer.status == 200, answer.body
        refused = await client.post(path, body | {"other": 1})
        assert (refused.status, refused.error["param"]) == (400, "other")
        assert (await client.post(path, body | {"stop": 5})).error["param"] == "stop"
        long = await client.post(path, body | {"user": None, "cache_salt": "x" * 70_000, "other": None})
        assert long.error["param"] == "cache_salt"

    run_with_app(scenario, template=TEMPLATE, max_model_len=1024)


@pytest.mark.parametrize("path", BODIES)
def test_fields_that_say_nothing_about_the_answer_are_taken(path: str) -> None:
    async def scenario(_llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        given: dict[type, Any] = {str: "x", bool: False, int: 3, dict: {"a": "b"}}
        kinds = msgspec.inspect.multi_type_info([SilentFields])[0].fields
        fields = {
            one.encode_name: given[_python_type(one.type)]
            for one in kinds  # each is something, or null
        }
        assert len(fields) == len(SilentFields.__struct_fields__)
        answer = await client.post(path, BODIES[path] | fields)
        assert answer.status == 200, answer.body

    run_with_app(scenario)


def _python_type(info: Any) -> type:
    (inner,) = (one for one in info.types if not isinstance(one, msgspec.inspect.NoneType))
    names = {"Str": str, "Bool": bool, "Int": int, "Dict": dict}
    return names[type(inner).__name__.removesuffix("Type")]


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (CHAT, "kv_transfer_params", {"do_remote_decode": True}),
        (CHAT, "watermarking", True),
        (CHAT, "return_prompt_text", True),
        (COMPLETIONS, "prompt_embeds", "AAAA"),
        (COMPLETIONS, "ec_transfer_params", {"a": 1}),
        (RESPONSES, "enable_response_messages", True),
        (RESPONSES, "previous_input_messages", [{}]),
        (CHAT, "guided_json", {"type": "object"}),
        (COMPLETIONS, "guided_choice", ["a"]),
    ],
)
def test_what_would_change_an_answer_and_is_not_supported_is_refused_also_where_others_are_ignored(
    path: str, field: str, value: Any
) -> None:
    async def scenario(_llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        answer = await client.post(path, BODIES[path] | {field: value})
        assert (answer.status, answer.error["param"]) == (400, field)
        off = False if value is True else None
        assert (await client.post(path, BODIES[path] | {field: off})).status == 200
        refused = await client.post("/tokenize", {"prompt": "x", "chat_template": "{{ messages }}"})
        assert refused.error["param"] == "chat_template"

    run_with_app(scenario, IGNORING)


UNKNOWN: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": MESSAGES, "min_characters": 10}, "min_characters"),
    (CHAT, {"messages": [{**MESSAGES[0], "extra": "0"}]}, "messages[0].extra"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "k": 1}]}]},
        "content[0].k",
    ),
    (CHAT, {"messages": MESSAGES, "stream_options": {"zip": 1}, "stream": True}, "stream_options.zip"),
    (COMPLETIONS, {"prompt": "x", "foo": [1]}, "foo"),
    (RESPONSES, {"input": [{"role": "user", "content": "x", "extra": 1}]}, "input[0].extra"),
    (RESPONSES, {"input": "x", "tools": [{"type": "function", "name": "f", "defer": 1}]}, "tools[0].defer"),
    ("/v1/messages", {"messages": MESSAGES, "model": "fake", "max_tokens": 4, "foo": 1}, "foo"),
    ("/tokenize", {"prompt": "x", "foo": 1}, "foo"),
]


@pytest.mark.parametrize(("path", "body", "place"), UNKNOWN, ids=[place for _, _, place in UNKNOWN])
@pytest.mark.parametrize("options", [ServerOptions(), IGNORING], ids=["refuse", "ignore"])
def test_unknown_fields_are_refused_with_their_place_or_left_out_as_the_operator_says(
    path: str, body: dict[str, Any], place: str, options: ServerOptions
) -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        answer = await client.post(path, body)
        if options is IGNORING:
            assert answer.status == 200, answer.body
            return
        assert answer.status == 400
        assert place in answer.error.get("param", answer.error["message"])
        assert "--unknown-fields ignore" in answer.error["message"]
        assert not llm.calls

    run_with_app(scenario, options, template=TEMPLATE)


@pytest.mark.parametrize(
    ("path", "more", "text"),
    [
        (COMPLETIONS, {"prompt": None}, "Either prompt or prompt_embeds must be provided and non-empty."),
        (COMPLETIONS, {"prompt": ""}, "Either prompt or prompt_embeds must be provided and non-empty."),
        (COMPLETIONS, {"prompt": [[-1]]}, "greater than or equal to 0"),
        (CHAT, {"seed": 2**63}, "less_than_equal"),
        (CHAT, {"seed": -(2**63) - 1}, "greater_than_equal"),
        (RESPONSES, {"seed": 2**63}, "less_than_equal"),
        (CHAT, {"logit_bias": {"bad1": 50.0, "1": 1.0, "bad2": 20.0}}, "{'bad1': 50.0, 'bad2': 20.0}"),
        (CHAT, {"logit_bias": {"2049": 1.0}}, "logit_bias=2049: token ids from 0 to 2047"),
        (CHAT, {"stop_token_ids": [2049]}, "vocab_size=2048"),
        (CHAT, {"stop_token_ids": [-1]}, "stop_token_ids[0]=-1"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "word " * 500}]},
            "maximum context length is 128 tokens",
        ),
        (CHAT, {"response_format": {"type": "json_schema"}}, "the 'json_schema' field must be provided"),
    ],
)
def test_refusals_have_the_words_that_clients_of_vllm_look_for(path: str, more: Any, text: str) -> None:
    async def scenario(_llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        answer = await client.post(path, BODIES[path] | more)
        assert answer.status == 400
        assert text in answer.error["message"]

    run_with_app(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_has_the_request_id_that_its_caller_gave_in_a_header_or_in_the_body(stream: bool) -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        for path, body in BODIES.items():
            body = body | {"stream": stream}
            for more, headers in (({}, {"x-request-id": "mine"}), ({"request_id": "mine"}, {})):
                answer = await client.post(path, body | more, **headers)
                assert (answer.status, answer.headers["x-request-id"]) == (200, "mine")
                assert answer.headers["request-id"] in answer.body.decode()
                assert "mine" in llm.calls[-1].options.names
            both = await client.post(path, body | {"request_id": "other"}, **{"x-request-id": "mine"})
            assert both.headers["x-request-id"] == "mine"
        llm.error = RequestFailedError("full", "overloaded")
        for body in (BODIES[CHAT] | {"stream": stream}, {"messages": 5}):
            assert (await client.post(CHAT, body, **{"x-request-id": "mine"})).headers[
                "x-request-id"
            ] == "mine"

    run_with_app(scenario)


def test_responses_take_the_sampling_fields_of_the_other_routes() -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        asked = {
            **{"top_k": 40, "min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": 0.5, "seed": 42},
            **{"stop_token_ids": [5], "ignore_eos": True, "logit_bias": {"7": 1.0}, "min_tokens": 2},
        }
        assert (await client.post(RESPONSES, BODIES[RESPONSES] | asked)).status == 200
        params = llm.calls[0].params
        assert {name: getattr(params, name) for name in asked} == asked | {"logit_bias": {7: 1.0}}
        limited = {"structured_outputs": {"choice": ["a", "b"]}}
        assert (await client.post(RESPONSES, BODIES[RESPONSES] | limited)).status == 200
        assert llm.calls[1].grammar
        both = limited | {"text": {"format": {"type": "json_object"}}}
        answer = await client.post(RESPONSES, BODIES[RESPONSES] | both)
        assert "text.format" in answer.error["message"]

    run_with_app(scenario)


def test_documents_are_given_to_the_chat_template() -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        body = BODIES[CHAT] | {"documents": [{"title": "t", "text": "a document"}]}
        assert (await client.post(CHAT, body)).status == 200
        ids = llm.calls[0].prompt
        assert llm.tokenizer.decode(ids) == "a document: Hi"

    run_with_app(scenario, template="{{ documents[0].text }}: {{ messages[0].content }}")


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (BODIES[CHAT] | {"max_completion_tokens": 5}, "chat.completion"),
        (BODIES[COMPLETIONS], "text_completion"),
        (BODIES[COMPLETIONS] | {"stream": True}, "text_completion"),
    ],
)
def test_an_invocation_is_answered_as_the_route_that_its_body_is_meant_for(body: Any, kind: str) -> None:
    async def scenario(_llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        answer = await client.post("/invocations", body)
        assert (answer.events[0] if body.get("stream") else answer.json)["object"] == kind

    run_with_app(scenario)


def test_an_invocation_of_an_embedding_model_and_one_of_nothing_that_is_known() -> None:
    async def scenario(_llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        answer = await client.post("/invocations", {"input": ["a", "b"]})
        assert [one["object"] for one in answer.json["data"]] == ["embedding"] * 2
        assert (await client.post("/invocations", {"text_1": "a", "text_2": ["b"]})).json["data"]
        assert (await client.post("/invocations", {"query": "a", "documents": ["b"]})).json["results"]
        for body, text in (({"n": 1}, "'messages', 'prompt'"), (b"{", "JSON"), ([1], "JSON")):
            refused = await client.post("/invocations", body)
            assert refused.status == 400
            assert text in refused.error["message"]
        assert (await client.post("/invocations", {"messages": MESSAGES, "x": 1})).error["param"] == "x"

    run_with_app(scenario, tasks=("embed", "score"), embedding_size=4)


def test_the_load_counts_the_requests_under_way() -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        loads = [(await client.get("/load")).json]
        llm.gate.clear()
        running = asyncio.create_task(client.post(CHAT, BODIES[CHAT]))
        await llm.started.wait()
        loads.append((await client.get("/load")).json)
        llm.gate.set()
        await running
        loads.append((await client.get("/load")).json)
        assert loads == [{"server_load": number} for number in (0, 1, 0)]

    run_with_app(scenario)


def test_a_server_tells_what_it_was_started_with_but_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "secret")
    monkeypatch.setenv("QUIRE_SOMETHING", "plain")

    async def scenario(_llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        text = (await client.get("/server_info")).json
        assert isinstance(text["vllm_config"], str)
        info = (await client.get("/server_info?config_format=json")).json
        assert info["vllm_config"]["models"]["fake"]["max_model_len"] == 128
        assert info["vllm_config"]["server"]["unknown_fields"] == "refuse"
        assert info["vllm_env"].get("QUIRE_SOMETHING") == "plain"
        assert "secret" not in str(info)
        assert not any("hash" in name for name in info["vllm_config"]["server"])
        assert (await client.get("/server_info?config_format=xml")).error["param"] == "config_format"

    run_with_app(scenario)


def test_the_tokenizer_tells_its_settings_only_where_the_operator_wants_it() -> None:
    async def asked(_llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        info = (await client.get("/tokenizer_info")).json
        assert isinstance(info["tokenizer_class"], str)
        assert "<|im_start|>" in info["chat_template"]
        assert all(
            isinstance(value, str) for name, value in info.items() if name.endswith("_token") and value
        )

    async def not_asked(_llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        assert (await client.get("/tokenizer_info")).status == 404

    run_with_app(asked, ServerOptions(enable_tokenizer_info_endpoint=True))
    run_with_app(not_asked)


def test_a_model_card_tells_what_was_loaded() -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        (card,) = (await client.get("/v1/models")).json["data"]
        assert (card["root"], card["parent"], card["max_model_len"]) == (llm.facts.model, None, 128)
        assert card["permission"] == []
        llm.facts = msgspec.structs.replace(llm.facts, weight_file="/models/model.gguf")
        (card,) = (await client.get("/v1/models")).json["data"]
        assert card["root"] == "/models/model.gguf"

    run_with_app(scenario)


IMAGE, CUSTOM = {"type": "input_image", "image_url": "u", "detail": "auto"}, {"type": "custom", "custom": {}}


@pytest.mark.parametrize(
    ("path", "body", "param", "value"),
    [
        (
            RESPONSES,
            {"input": [{"role": "user", "content": [IMAGE]}]},
            "input[0].content[0].type",
            "input_image",
        ),
        (
            RESPONSES,
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_data": "x" * 90_000}]}]},
            "input[0].content[0].type",
            "input_file",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            "messages[0].content[0].type",
            "input_image",
        ),
        (CHAT, {"messages": MESSAGES, "tools": [CUSTOM]}, "tools[0].type", "custom"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id", "x"),
        (RESPONSES, {"input": "Hi", "previous_response_id": "resp_x"}, "previous_response_id", "resp_x"),
    ],
)
@pytest.mark.parametrize("unknown", ["refuse", "ignore"])
def test_what_is_of_another_type_is_refused_by_its_type_and_not_by_its_fields(
    path: str, body: dict[str, Any], param: str, value: str, unknown: str
) -> None:
    async def scenario(_llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        answer = await client.post(path, body)
        assert (answer.status, answer.error["param"]) == (400, param)
        assert param in answer.error["message"]
        assert value in answer.error["message"]

    run_with_app(scenario, options=ServerOptions(unknown_fields=unknown), template=TEMPLATE)


def test_an_answer_without_a_text_comes_back_and_marks_of_caches_are_left() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    part = {"type": "text", "text": "Hi", **mark}
    tool = {"type": "function", "function": {"name": "f"}}

    async def scenario(_llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        async def count(*messages: dict[str, Any], **fields: Any) -> int:
            answer = await client.post("/tokenize", {"messages": list(messages), **fields})
            assert answer.status == 200, answer.body
            return answer.json["tokens"]

        asked, said = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "No"}
        silent = await count(asked, said | {"content": ""}, asked)
        assert await count(asked, said | {"content": None}, asked) == silent
        refused = {"role": "assistant", "content": None, "refusal": "No"}
        assert await count(asked, refused, asked) == await count(asked, said, asked) != silent
        plain = await count(asked, asked, tools=[tool])
        assert await count({"role": "user", "content": [part]}, asked | mark, tools=[tool | mark]) == plain

    run_with_app(scenario, template=TEMPLATE)


def test_a_path_or_a_method_that_is_not_there_is_named() -> None:
    async def scenario(_llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        answer = await client.get("/v1/images/generations")
        assert (answer.status, answer.error["code"]) == (404, "not_found")
        assert answer.error["message"].startswith("path='/v1/images/generations': not found")
        answer = await client.get(COMPLETIONS)
        assert (answer.status, answer.error["code"]) == (405, "method_not_allowed")
        assert answer.error["message"] == "method='GET': POST with this path"

    run_with_app(scenario)
