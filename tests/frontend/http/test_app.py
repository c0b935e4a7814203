"""The routes over a scripted engine, called without sockets."""

from __future__ import annotations

import json
import weakref
from typing import Any

import pytest
from openai_fakes import CHAT, MESSAGES, AsgiClient, FakeLLM, chat, run_with_app
from quire.frontend.http.bodies.schema import ChatMessage
from quire.frontend.http.caller import Caller
from quire.frontend.http.dialects.chat import ChatCompletionRequest, create_chat_completion
from quire.frontend.http.dialects.completions import CompletionRequest, create_completion
from quire.frontend.http.options import ServerOptions
from quire.frontend.http.serving import Serving
from quire.frontend.http.stream import EventStream
from quire.ipc.params.sampling_params import SAMPLING_FIELDS, SamplingParams


def test_a_chat_is_answered_in_openais_shape_with_usage() -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        answer = await client.post(CHAT, chat(n=2))
        assert answer.status == 200
        body = answer.json
        assert body["object"] == "chat.completion"
        assert [choice["message"]["content"] for choice in body["choices"]] == ["Hello there!"] * 2
        assert [choice["index"] for choice in body["choices"]] == [0, 1]
        num_prompt = len(llm.calls[0].prompt)
        assert body["usage"] == {
            "prompt_tokens": num_prompt,
            "completion_tokens": 6,
            "total_tokens": num_prompt + 6,
            "prompt_tokens_details": {"cached_tokens": 3},
        }
        assert llm.calls[0].params.max_tokens is None

    run_with_app(scenario)


def test_a_streamed_chat_begins_with_the_role_and_ends_with_usage_and_done() -> None:
    async def scenario(_llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        answer = await client.post(CHAT, chat(stream=True, stream_options={"include_usage": True}))
        assert answer.headers["content-type"].startswith("text/event-stream")
        *chunks, usage, done = answer.events
        assert done == "[DONE]"
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 3
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        deltas = [chunk["choices"][0] for chunk in chunks[1:]]
        assert [delta["delta"]["content"] for delta in deltas] == ["Hello", " there", "!"]
        assert [delta["finish_reason"] for delta in deltas] == [None, None, "stop"]
        assert all(chunk["usage"] is None for chunk in chunks)
        assert len({json.dumps([c["id"], c["created"], c["model"], c["object"]]) for c in chunks}) == 1

    run_with_app(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_named_in_its_header_as_in_its_body(stream: bool) -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        bodies = {CHAT: chat(), "/v1/completions": {"prompt": "x"}, "/v1/responses": {"input": "x"}}
        bodies["/v1/messages"] = chat(max_tokens=1)
        for path, body in bodies.items():
            answer = await client.post(path, body | {"stream": stream})
            name = answer.headers["x-request-id"]
            assert name in answer.body.decode()
            assert llm.calls[-1].request_id.startswith(name)

    run_with_app(scenario)


def test_a_model_name_with_signs_of_its_own_does_not_spoil_the_chunks() -> None:
    async def scenario(_llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        name = '100%d "choices":[] \\'
        for path, body in ((CHAT, chat(model=name)), ("/v1/completions", {"model": name, "prompt": "x"})):
            answer = await client.post(path, body | {"stream": True})
            assert {chunk["model"] for chunk in answer.events[:-1]} == {name}

    run_with_app(scenario, served_model_name='100%d "choices":[] \\')


def test_logprobs_name_tokens_bytes_and_alternatives_and_infinity_is_a_number() -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        answer = await client.post(CHAT, chat(logprobs=True, top_logprobs=2))
        (entry,) = answer.json["choices"][0]["logprobs"]["content"]
        assert entry["token"] == "Hello there!"
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.5, -9999.0]
        assert llm.calls[0].params.logprobs == 2

    run_with_app(scenario)


@pytest.mark.parametrize(
    ("options", "forced", "in_chunks", "at_end"),
    [
        (None, False, False, False),
        ({}, False, False, False),
        ({"continuous_usage_stats": True}, False, False, False),
        ({"include_usage": True}, False, False, True),
        ({"include_usage": True, "continuous_usage_stats": True}, False, True, True),
        (None, True, True, True),
        ({"include_usage": False}, True, True, True),
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_a_stream_tells_its_usage_as_it_is_asked_to_or_as_the_server_always_does(
    path: str, options: Any, forced: bool, in_chunks: bool, at_end: bool
) -> None:
    async def scenario(_llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        body = chat() if path == CHAT else {"prompt": "x"}
        answer = await client.post(path, body | {"stream": True, "stream_options": options})
        chunks = answer.events[:-1]
        last = chunks.pop() if at_end else None
        assert [bool(chunk.get("usage")) for chunk in chunks] == [in_chunks] * len(chunks)
        assert last is None or (last["choices"], last["usage"]["completion_tokens"]) == ([], 3)

    run_with_app(scenario, ServerOptions(enable_force_include_usage=forced))


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_token_ids_of_prompt_and_answer_are_told_when_asked_for_whole_and_streamed(path: str) -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        body = (chat() if path == CHAT else {"prompt": "x"}) | {"n": 2}
        whole = (await client.post(path, body | {"return_token_ids": True})).json
        expected = llm.calls[0].prompt if path == CHAT else llm.tokenizer.encode("x")
        places = [whole] if path == CHAT else whole["choices"]
        assert [one["prompt_token_ids"] for one in places] == [expected] * len(places)
        answer = await client.post(path, body | {"return_token_ids": True, "stream": True})
        chunks = answer.events[:-1]
        given = [one for chunk in chunks for one in ([chunk] if path == CHAT else chunk["choices"])]
        assert [one["prompt_token_ids"] for one in given if "prompt_token_ids" in one] == [expected] * len(
            places
        )
        for index, choice in enumerate(whole["choices"]):
            own = [one for chunk in chunks for one in chunk["choices"] if one["index"] == index]
            ids = [token_id for one in own for token_id in one.get("token_ids", ())]
            assert len(ids) == len(llm.pieces)
            assert len(choice["token_ids"]) == 1  # as the scripted engine has them
        plain = (await client.post(path, body)).json
        absent = [plain, *plain["choices"]] if path == CHAT else plain["choices"]
        names = ("prompt_logprobs", "prompt_token_ids", "token_ids")
        assert {one[name] for one in absent for name in names if name in one} == {None}
        assert all("prompt_logprobs" in one for one in (absent[:1] if path == CHAT else absent))

    run_with_app(scenario)


def test_several_prompts_are_answered_in_their_order_and_numbered_by_prompt_and_n() -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        body = {"prompt": ["a", "b", "c"], "n": 2, "echo": True}
        answer = await client.post("/v1/completions", body)
        choices = answer.json["choices"]
        assert [choice["index"] for choice in choices] == list(range(6))
        assert [choice["text"][0] for choice in choices] == list("aabbcc")
        assert llm.calls[0].params.max_tokens == 16
        streamed = await client.post("/v1/completions", body | {"stream": True})
        texts = dict.fromkeys(range(6), "")
        for chunk in streamed.events[:-1]:
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert list(texts.values()) == [choice["text"] for choice in choices]

    run_with_app(scenario)


def test_token_ids_are_a_prompt_and_their_text_is_echoed() -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        ids = llm.tokenizer.encode("Once upon")
        answer = await client.post("/v1/completions", {"prompt": ids, "echo": True, "max_tokens": 0})
        assert answer.json["choices"][0]["text"] == "Once upon"
        assert answer.json["usage"]["completion_tokens"] == 0
        two = await client.post("/v1/completions", {"prompt": [ids, ids]})
        assert [call.prompt for call in llm.calls[1:]] == [ids, ids]
        assert two.status == 200

    run_with_app(scenario)


def test_the_models_recommendations_are_defaults_that_a_request_overrides() -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, serving: Serving) -> None:
        llm.defaults = SamplingParams(temperature=0.3, top_k=5)
        serving.open()
        await client.post(CHAT, chat())
        await client.post(CHAT, chat(temperature=0.9, max_completion_tokens=4, max_tokens=9))
        first, second = (call.params for call in llm.calls)
        assert (first.temperature, first.top_k, first.max_tokens) == (0.3, 5, None)
        assert (second.temperature, second.top_k, second.max_tokens) == (0.9, 5, 4)

    run_with_app(scenario)


def test_every_declared_number_and_switch_reaches_the_engine() -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        declared = [field for field in SAMPLING_FIELDS.values() if field.kind in (int, float, bool)]
        asked = {field.name: 1 if field.kind is int else field.kind(0.5) for field in declared}
        for name in ("logprobs", "detokenize"):  # a chat's has another type; the server needs the text
            del asked[name]
        assert (await client.post(CHAT, chat(**asked))).status == 200
        assert asked == {name: getattr(llm.calls[0].params, name) for name in asked}

    run_with_app(scenario)


def test_xargs_reach_the_logits_processors_of_an_engine_that_has_some() -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        assert (await client.post(CHAT, chat(vllm_xargs={"a": [1]}))).status == 200
        assert llm.calls[0].params.extra_args == {"a": [1]}
        answer = await client.post(CHAT, chat(vllm_xargs={"a": "x" * 10_000}))
        assert answer.status == 400
        assert answer.error["param"] == "vllm_xargs"

    run_with_app(scenario, logits_processors=("some:Class",))


def test_harmless_fields_of_clients_are_taken() -> None:
    async def scenario(_llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        echoed = {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "tool_calls": None}
        fields = {
            "user": "me",
            "metadata": {"a": "b"},
            "store": False,
            "service_tier": "auto",
            "tools": [],
            "tool_choice": "none",
            "response_format": {"type": "text"},
            "stop": None,
            "n": None,
            "messages": [*MESSAGES, echoed, {"role": "user", "content": [{"type": "text", "text": "y"}]}],
        }
        answer = await client.post(CHAT, chat(**fields))
        assert answer.status == 200, answer.body

    run_with_app(scenario)


BAD_CHATS: list[tuple[Any, str | None, str]] = [
    ({"messages": MESSAGES, "max_tokns": 1}, "max_tokns", "did you mean 'max_tokens'"),
    ({"model": "fake"}, "messages", "required"),
    (chat(messages=[]), "messages", "length >= 1"),
    (chat(messages=[{"content": "x"}]), "messages[0].role", "required"),
    (chat(messages=[{"role": "user", "content": 5}]), "messages[0].content", "5"),
    (chat(messages=[{"role": "user"}]), "messages[0].content", "a text"),
    (
        chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
        "messages[0].content[0].type",
        "text",
    ),
    (chat(messages=[{"role": "user", "content": "word " * 500}]), "messages", "max_model_len=128"),
    (chat(temperature=3), "temperature", "<= 2.0"),
    (chat(temperature="hot"), "temperature", "'hot'"),
    (chat(n=0), "n", ">= 1"),
    (chat(vllm_xargs={"a": 1}), "vllm_xargs", "this engine has no logits processors"),
    (chat(n=1000), "n", "1000"),
    (chat(max_tokens=0), "max_tokens", "at least 1"),
    (chat(top_logprobs=2), "top_logprobs", "logprobs=true"),
    (chat(logprobs=True, top_logprobs=100), "top_logprobs", "<= 20"),
    (chat(stop=["x"] * 100), "stop", "<= 64"),
    (chat(stop=[""]), "stop", "1 to 1024"),
    (chat(logit_bias={"x": 1.0}), "logit_bias", "token ids"),
    (chat(truncation_side="up"), "truncation_side", "one of 'left', 'right'"),
    (
        chat(repetition_detection={"max_pattern_size": 2, "min_count": 2, "min_pattern_size": 3}),
        "repetition_detection.min_pattern_size",
        "an integer from 1 to 2",
    ),
    (chat(min_tokens=9, max_tokens=3), "min_tokens", "max_tokens=3"),
    (chat(tools=[{"type": "function"}]), "tools[0].function", "required"),
    (chat(response_format={"type": "xml"}), "response_format.type", "text, json_object, json_schema or"),
    (chat(guided_json={"type": "object"}), "guided_json", "no such field: it is structured_outputs.json"),
    (chat(chat_template="{{ messages }}"), "chat_template", "the model's own"),
    (chat(chat_template_kwargs={"chat_template": "x"}), "chat_template_kwargs.chat_template", "server"),
    (chat(stream_options={"include_usage": True}), "stream_options", "stream=true"),
    (chat(stream=True, best_of=3), "best_of", "stream"),
    (chat(cache_salt=""), "cache_salt", ">= 1"),
    (chat(seed=2**70), "seed", ""),
    (b'{"messages": ', None, "JSON"),
    (b"\xff\xfe", None, "JSON"),
    (b'["a"]', "body", "object"),
    (b'{"messages": ' + b"[" * 50_000, "messages[0]", "object"),
    (b'{"messages": [{"role": "user"}], "chat_template_kwargs": ' + b'{"a":' * 100_000, None, "JSON"),
    (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', None, "JSON"),
]


@pytest.mark.parametrize(("body", "param", "text"), BAD_CHATS)
def test_a_bad_chat_is_refused_with_its_field_value_and_what_is_allowed(
    body: Any, param: str | None, text: str
) -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        answer = await client.post(CHAT, body)
        assert answer.status == 400, answer.body
        assert answer.error["type"] == "invalid_request_error"
        assert answer.error["param"] == param
        assert text in answer.error["message"]
        assert len(answer.error["message"]) < 2000
        assert not llm.calls

    run_with_app(scenario)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a"] * 300}, "prompt"),
        ({"prompt": [[-1]]}, "prompt[0][0]"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": ["a"] * 200, "n": 128}, "n"),
        ({"prompt": "x", "best_of": 1, "n": 2}, "best_of"),
        ({"prompt": {"prompt": "x"}}, "prompt"),
    ],
)
def test_a_bad_completion_is_refused_with_its_field(body: Any, param: str) -> None:
    async def scenario(_llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        answer = await client.post("/v1/completions", body)
        assert (answer.status, answer.error["param"]) == (400, param), answer.body

    run_with_app(scenario)


def test_a_response_streams_events_in_order_with_sequence_numbers() -> None:
    async def scenario(_llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        body = {"input": [{"role": "user", "content": "Hi"}], "instructions": "Be brief.", "stream": True}
        answer = await client.post("/v1/responses", body)
        events = answer.events
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        kinds = [event["type"].removeprefix("response.") for event in events]
        assert kinds == [
            "created",
            "in_progress",
            "output_item.added",
            "content_part.added",
            *["output_text.delta"] * 3,
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "completed",
        ]
        assert events[-1]["response"]["output"][0]["content"][0]["text"] == "Hello there!"
        assert events[-1]["response"]["usage"]["output_tokens"] == 3

    run_with_app(scenario)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "x", "tools": [{"type": "file_search"}]}, "tools[0].type"),
        ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format.name"),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"input": "x", "reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": "word " * 500}, "input"),
    ],
)
def test_a_response_that_cannot_be_made_is_refused(fields: dict[str, Any], param: str) -> None:
    async def scenario(_llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        answer = await client.post("/v1/responses", fields)
        assert (answer.status, answer.error["param"]) == (400, param), answer.body

    run_with_app(scenario)


def test_tokenize_and_detokenize_are_inverse_and_tokenize_renders_chats() -> None:
    async def scenario(_llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        answer = await client.post("/tokenize", {"prompt": "Once upon a time", "return_token_strs": True})
        tokens = answer.json["tokens"]
        assert answer.json["count"] == len(tokens) == len(answer.json["token_strs"])
        assert (await client.post("/detokenize", {"tokens": tokens})).json == {"prompt": "Once upon a time"}
        rendered = await client.post("/tokenize", {"messages": MESSAGES})
        assert rendered.json["count"] > 1
        for body in ({}, {"prompt": "x", "messages": MESSAGES}):
            assert (await client.post("/tokenize", body)).status == 400
        for tokens in ([-1], [2**40], ["a"]):
            assert (await client.post("/detokenize", {"tokens": tokens})).status == 400

    run_with_app(scenario)


def test_every_reference_of_the_openapi_document_leads_somewhere() -> None:
    async def scenario(_llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        document = (await client.get("/openapi.json")).json
        names = set(document["components"]["schemas"])
        found = {part.split('"')[0] for part in json.dumps(document).split('"#/components/schemas/')[1:]}
        assert found <= names
        items = document["components"]["schemas"]["ResponsesRequest"]["properties"]["input"]["anyOf"][1][
            "items"
        ]
        assert {"$ref": "#/components/schemas/FunctionCallOutputItem"} in items["anyOf"]
        assert {"ChatCompletionRequest", "CompletionRequest", "ErrorResponse"} <= found
        post = document["paths"][CHAT]["post"]
        assert {"200", "400", "401", "404", "413", "429", "503"} <= set(post["responses"])
        assert "422" not in post["responses"]
        for path, operations in document["paths"].items():
            for operation in operations.values():
                assert operation["responses"]["200"]["content"], path
                assert {"401", "503"} <= set(operation["responses"]), path

    run_with_app(scenario)


def test_the_docs_name_every_route_and_field_and_load_nothing_from_elsewhere() -> None:
    async def scenario(_llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        answer = await client.get("/docs")
        page = answer.body.decode()
        document = (await client.get("/openapi.json")).json
        for path in document["paths"]:
            assert f" {path}</h2>" in page
        for field in document["components"]["schemas"]["ChatCompletionRequest"]["properties"]:
            assert f"<code>{field}</code>" in page
        assert "http" not in page
        assert "<script" not in page
        assert "default-src 'none'" in answer.headers["content-security-policy"]

    run_with_app(scenario)


def test_token_ids_that_are_too_many_or_none_are_refused_with_the_number_and_the_place() -> None:
    async def scenario(_llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        many = await client.post("/v1/completions", {"prompt": [7] * 1001})
        assert many.error["message"].startswith("prompt='1001 tokens': at most 127 (max_model_len=128")
        wrong = await client.post("/detokenize", {"tokens": [1, -1]})
        assert (wrong.status, wrong.error["param"]) == (400, "tokens[1]")

    run_with_app(scenario)


def test_what_an_answer_repeats_is_as_short_as_openai_has_it() -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        for field, value in (("metadata", {"a": "x" * 513}), ("metadata", {str(i): "" for i in range(17)})):
            answer = await client.post("/v1/responses", {"input": "Hi", field: value})
            assert (answer.status, answer.error["param"].partition("[")[0]) == (400, field)
        assert (await client.post(CHAT, chat(user="x" * 513))).status == 400
        assert (await client.post(CHAT, chat(user="x" * 512, metadata={"a": "b"}))).status == 200
        assert len(llm.calls) == 1
        unknown = await client.post(CHAT, chat(model="\U000e0001" * 300))
        assert len(unknown.error["message"]) < 400

    run_with_app(scenario)


def test_a_stream_holds_neither_its_prompts_nor_what_else_is_large_in_its_request() -> None:
    class Texts(list[Any]):
        """Can be referred to weakly."""

    async def scenario(llm: FakeLLM, _client: AsgiClient, serving: Serving) -> None:
        llm.gate.clear()
        prompts = Texts(["One", "Two"])
        seen = weakref.ref(prompts)
        large = {"type": "text", "x": "x" * 100_000}
        asked = CompletionRequest(prompt=prompts, stream=True, response_format=large)
        response = await create_completion(serving, asked, Caller())
        assert isinstance(response, EventStream)
        del prompts
        await anext(response._events)
        await llm.wait_for_calls(2)
        assert seen() is None
        assert asked.response_format is None
        assert asked.prompt is None
        llm.gate.set()
        assert [b"One" in data async for data in response._events]

    run_with_app(scenario)


def test_a_stream_of_a_chat_holds_nothing_large_of_its_request() -> None:
    async def scenario(_llm: FakeLLM, _client: AsgiClient, serving: Serving) -> None:
        asked = ChatCompletionRequest(
            messages=[ChatMessage(role="user", content="Hi")], stream=True, service_tier="x" * 100_000
        )
        response = await create_chat_completion(serving, asked, Caller())
        assert isinstance(response, EventStream)
        await anext(response._events)
        assert not any((asked.messages, asked.service_tier))
        assert [data async for data in response._events][-1].endswith(b"[DONE]\n\n")

    run_with_app(scenario)
