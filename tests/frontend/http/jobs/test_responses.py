"""/v1/responses over the app: tools, thoughts, what continues a response, what is done with stored ones."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from openai_fakes import Answer, AsgiClient, FakeLLM, run_with_app
from pydantic import TypeAdapter
from quire.frontend.http.connections.auth import hash_key
from quire.frontend.http.limits import Limits
from quire.frontend.http.options import ServerOptions
from quire.frontend.http.serving import Serving
from tool_template import PLAIN_TEMPLATE, TEMPLATE

PATH = "/v1/responses"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
NOW: dict[str, Any] = {"type": "function", "name": "now"}
THOUGHTS = ("<think>\n", "Hm", ", so.", "\n</think>\n\n")
CALL = ("<tool_call>\n", '{"name": "weather", "argu', 'ments": {"city": ', '"Rome"}}', "\n</tool_call>")
CALL_2 = ("\n<tool_call>\n", '{"name": "now", "arguments": {}}', "\n</tool_call>")
ARGUMENTS = '{"city": "Rome"}'
FORMAT_PLACE = "text.format.schema.type"
TOO_LONG_PLACE = "tools[0].tools[1].name"
BAD: dict[str, Any] = {"strict": True, "parameters": {"type": "object", "required": 1}}
BAD_PLACE = "tools[1].tools[0].parameters.required"
STREAM_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def body(**fields: Any) -> dict[str, Any]:
    return {"input": "How warm is it?", "tools": [WEATHER, NOW]} | fields


def in_namespace(name: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "namespace", "name": name, "description": "Some.", "tools": [*tools]}


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    """A response without what is new in every one."""
    output = [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in response["output"]]
    usage = response["usage"] | {"output_tokens_details": None}  # the fake counts a token an output
    return response | {"id": "", "created_at": 0, "output": output, "usage": usage}


def run(pieces: tuple[str, ...], *bodies: dict[str, Any]) -> list[Answer]:
    """The answers of a model that says `pieces`."""
    answers: list[Answer] = []

    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        llm.pieces = pieces
        for one in bodies:
            answers.append(await client.post(PATH, one))
            assert answers[-1].status == 200, answers[-1].body

    run_with_app(scenario, template=TEMPLATE, max_model_len=2000)
    return answers


@pytest.mark.parametrize(
    ("pieces", "kinds"),
    [
        ((*THOUGHTS, "Let me ", "see. ", *CALL), ["reasoning", "message", "function_call"]),
        ((*CALL, *CALL_2), ["function_call", "function_call"]),
        (("20 ", "degrees"), ["message"]),
    ],
)
def test_a_stream_ends_in_the_whole_answer_and_openais_types_accept_both(
    pieces: tuple[str, ...], kinds: list[str]
) -> None:
    whole, streamed = run(pieces, body(), body(stream=True))
    events = streamed.events
    for event in events:
        STREAM_EVENT.validate_json(json.dumps(event))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert without_ids(events[-1]["response"]) == without_ids(whole.json)
    answer = Response.model_validate_json(whole.body)
    assert [item.type for item in answer.output] == kinds
    for item in answer.output:
        if item.type == "function_call" and item.name == "weather":
            assert item.arguments == ARGUMENTS
            told = [event["delta"] for event in events if event["type"].endswith("arguments.delta")]
            assert len(told) > 1  # as they were generated
    assert "<" not in answer.output_text
    counted = events[-1]["response"]["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert (counted > 0) == ("reasoning" in kinds)
    assert answer.tools[0].type == "function"


def test_a_tool_loop_goes_on_by_the_id_of_the_response_or_by_its_items() -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, serving: Serving) -> None:
        llm.pieces = (*THOUGHTS, *CALL)
        asked = [{"role": "user", "content": "How warm is it?"}]
        first = (await client.post(PATH, body(input=asked, instructions="Be brief."))).json
        result = {
            "type": "function_call_output",
            "call_id": first["output"][1]["call_id"],
            "output": "20 degrees",
        }
        llm.pieces = ("It is ", "20.")
        fields = {"tools": [WEATHER, NOW], "instructions": "Be brief."}
        by_id = {"previous_response_id": first["id"], "input": [result]} | fields
        references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
        bodies = [
            by_id,
            {"input": [*asked, *first["output"], result]} | fields,
            {"input": [*asked, *references, result], "store": False} | fields,
        ]
        answers = [(await client.post(PATH, one)).json for one in bodies]
        assert len({tuple(call.prompt) for call in llm.calls[1:]}) == 1
        prompt = serving.tokenizer.decode(llm.calls[1].prompt, skip_special_tokens=False)
        assert "Hm, so." in prompt
        assert '"arguments": {"city": "Rome"}' in prompt
        assert "tool\n20 degrees" in prompt
        assert answers[0]["previous_response_id"] == first["id"]
        assert [answer["store"] for answer in answers] == [True, True, False]
        # And on: what has been continued is continued.
        await client.post(PATH, {"previous_response_id": answers[0]["id"], "input": "Thanks"})
        prompt = serving.tokenizer.decode(llm.calls[-1].prompt)
        assert all(text in prompt for text in ("How warm", "20 degrees", "It is 20.", "Thanks"))
        listed = (await client.get(f"{PATH}/{answers[0]['id']}/input_items")).json
        kinds = [item["type"] for item in reversed(listed["data"])]
        assert kinds == ["message", "reasoning", "function_call", "function_call_output"]
        assert (listed["first_id"], listed["last_id"]) == (listed["data"][0]["id"], listed["data"][-1]["id"])
        items = f"{PATH}/{answers[0]['id']}/input_items?limit=3"
        first_page = (await client.get(items)).json
        assert (first_page["data"], first_page["has_more"]) == (listed["data"][:3], True)
        second = (await client.get(f"{items}&after={first_page['last_id']}")).json
        assert (second["data"], second["has_more"]) == (listed["data"][3:], False)
        assert (await client.get(f"{items}&order=asc")).json["data"] == listed["data"][:0:-1]
        for field, bad in (("limit", "0"), ("limit", "x"), ("after", "nobody"), ("order", "up")):
            refused = await client.get(f"{PATH}/{answers[0]['id']}/input_items?{field}={bad}")
            assert (refused.status, refused.error["param"]) == (400, field)

    run_with_app(scenario, template=TEMPLATE, max_model_len=2000)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [WEATHER, {"type": "web_search"}], "tool_choice": "required"}, "tools[1].type"),
        ({"tools": [{"type": "file_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "namespace", "name": "x" * 200, "tools": []}]}, "tools[0].name"),
        ({"tools": [in_namespace("x" * 120, NOW, WEATHER)]}, TOO_LONG_PLACE),
        ({"tools": [{"type": "web_search"}, in_namespace("a", NOW | BAD)]}, BAD_PLACE),
        ({"tools": [in_namespace("a", NOW), NOW | {"name": "a__now"}]}, "tools[1].name"),
        ({"tools": [in_namespace("a", *[NOW] * 257)]}, "tools"),
        ({"tools": [in_namespace("a", {"type": "custom", "name": "x"})]}, "tools[0].tools[0].type"),
        ({"tools": [in_namespace("a", NOW, {"name": "x"})]}, "tools[0].tools[1].type"),
        ({"tools": [WEATHER, {"type": "custom", "name": "apply_patch", "format": {}}]}, "tools[1].type"),
        ({"tools": [{"name": "weather"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "weather"}}]}, "tools[0].function"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tools": [WEATHER | {"name": "a b"}]}, "tools[0].name"),
        (
            {"tools": [WEATHER | {"parameters": {"type": "object", "properties": {"a": {"type": "x"}}}}]},
            "tools[0].parameters.properties.a.type",
        ),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "x"}}}}, FORMAT_PLACE),
        ({"tool_choice": {"type": "function", "name": "nobody"}}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"background": True, "store": False}, "store"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": [{"type": {}}]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
        ({"input": [{"type": "item_reference", "id": f"msg-{'0' * 34}-0"}]}, "input[0].id"),
        ({"input": [{"role": "user", "content": "x"}] * 5000}, "input"),
    ],
)
def test_what_cannot_be_done_is_refused_with_its_place(fields: dict[str, Any], param: str) -> None:
    async def scenario(_llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        answer = await client.post(PATH, body() | fields)
        assert (answer.status, answer.error["param"]) == (400, param), answer.body

    run_with_app(scenario, template=TEMPLATE, max_model_len=2000)


def test_a_call_that_cannot_be_read_stays_text_and_is_marked() -> None:
    broken = ("<tool_call>\n", '{"name": "weather", "arguments": oops}', "\n</tool_call>")
    for answer in run(broken, body(), body(stream=True)):
        response = answer.events[-1]["response"] if answer.body.startswith(b"event") else answer.json
        assert response["tool_parse_error"] is True
        assert "oops" in response["output"][-1]["content"][0]["text"]


def test_calls_and_the_answer_follow_a_grammar() -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        text = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
        named = {"type": "function", "name": "now"}
        for fields in ({}, {"tool_choice": "required"}, {"tool_choice": named}, {"text": text}):
            assert (await client.post(PATH, body(**fields))).status == 200
        assert (await client.post(PATH, body(tools=[]))).status == 200
        grammars = [call.grammar for call in llm.calls]
        assert len(set(grammars)) == 5
        assert grammars[4] == ""
        assert "weather" in grammars[0]
        assert "weather" not in grammars[2]

    run_with_app(scenario, template=TEMPLATE, max_model_len=2000)


def test_tools_of_a_template_that_has_none_are_refused() -> None:
    async def scenario(_llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        answer = await client.post(PATH, body())
        assert (answer.status, answer.error["param"]) == (400, "tools")

    run_with_app(scenario, template=PLAIN_TEMPLATE, max_model_len=2000)


def test_what_agents_send_beside_is_taken() -> None:
    """The fields of Codex and of the Agents SDK."""
    (answer,) = run(
        ("20",),
        body(
            store=False,
            include=["reasoning.encrypted_content"],
            reasoning={"effort": "medium", "summary": "auto"},
            parallel_tool_calls=False,
            tool_choice={
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "now"}],
            },
            prompt_cache_key="1",
            client_metadata={"x": "y"},
            max_tool_calls=4,
            metadata={"a": "b"},
        ),
    )
    said = answer.json
    assert (said["parallel_tool_calls"], said["store"], said["max_tool_calls"]) == (False, False, 4)
    assert said["reasoning"] == {"effort": "medium", "summary": "auto"}
    assert said["tool_choice"]["tools"] == [{"type": "function", "name": "now"}]


def test_functions_of_a_namespace_are_called_by_both_names_and_a_web_search_is_left_out() -> None:
    """As Codex offers those of MCP servers."""
    offered = [NOW, in_namespace("mcp__town", WEATHER), {"type": "web_search", "external_web_access": True}]
    call = (CALL[0], '{"name": "mcp__town__weather", "arguments": {"city": "Rome"}}', CALL[-1])

    async def scenario(llm: FakeLLM, client: AsgiClient, serving: Serving) -> None:
        llm.pieces = (*call, *CALL_2)
        whole = await client.post(PATH, body(tools=offered))
        streamed = await client.post(PATH, body(tools=offered, stream=True))
        said = Response.model_validate_json(whole.body)
        assert [tool.type for tool in said.tools] == ["function", "namespace"]
        for item in (whole.json["output"][0], streamed.events[-1]["response"]["output"][0]):
            assert (item["namespace"], item["name"], item["arguments"]) == ("mcp__town", "weather", ARGUMENTS)
        assert "namespace" not in whole.json["output"][1]
        added = next(event for event in streamed.events if event["type"] == "response.output_item.added")
        assert (added["item"]["namespace"], added["item"]["name"]) == ("mcp__town", "weather")
        inner = {"namespace": "mcp__town", "name": "weather"}
        call_id = whole.json["output"][0]["call_id"]
        output = {"type": "function_call_output", "call_id": call_id, "output": "20"} | inner
        asked = {"role": "user", "content": "How warm is it?"}
        by_id = {"previous_response_id": whole.json["id"], "input": [output]}
        by_items = {"input": [asked, *whole.json["output"], output]}
        for more in (by_id, by_items | {"tool_choice": {"type": "function", **inner}}):
            assert (await client.post(PATH, more | {"tools": offered})).status == 200
            prompt = serving.tokenizer.decode(llm.calls[-1].prompt)
            assert prompt.count("mcp__town__weather") == 2
            assert "web_search" not in prompt
        assert "now" not in llm.calls[-1].grammar

    run_with_app(scenario, template=TEMPLATE, max_model_len=2000)


def test_logprobs_of_thoughts_and_calls_are_not_among_those_of_the_text() -> None:
    fields = {"include": ["message.output_text.logprobs"]}
    pieces = (*THOUGHTS, "It ", "is.", *CALL)
    whole, streamed = run(pieces, body(**fields), body(stream=True, **fields))
    message = whole.json["output"][1]["content"][0]
    assert message == streamed.events[-1]["response"]["output"][1]["content"][0]
    told = [event["logprobs"] for event in streamed.events if event["type"] == "response.output_text.delta"]
    assert [one for some in told for one in some] == message["logprobs"]
    assert {"It ", "is."} <= {one["token"] for one in message["logprobs"]} <= {"It ", "is.", THOUGHTS[-1]}


def test_responses_are_each_keys_own_and_can_be_got_and_deleted() -> None:
    one, other = {"authorization": "Bearer one"}, {"authorization": "Bearer other"}

    async def scenario(_llm: FakeLLM, client: AsgiClient, serving: Serving) -> None:
        made = (await client.post(PATH, {"input": "Hi"}, **one)).json
        path = f"{PATH}/{made['id']}"
        for method, target in (("GET", path), ("DELETE", path), ("POST", f"{path}/cancel")):
            for key, status in ((other, 404), ({}, 401)):
                assert (await client.call(method, target, b"", key)).status == status
        follow = {"input": "Hi", "previous_response_id": made["id"]}
        refused = await client.post(PATH, follow, **other)
        assert (refused.status, refused.error["code"]) == (400, "previous_response_not_found")
        assert (await client.get(path, **one)).json == made
        assert (await client.post(f"{path}/cancel", {}, **one)).error["code"] == "invalid_state"
        deleted = await client.call("DELETE", path, b"", one)
        assert deleted.json == {"id": made["id"], "object": "response", "deleted": True}
        gone = await client.get(path, **one)
        assert (gone.status, gone.error["code"]) == (404, "response_not_found")
        assert serving.responses.store.num_bytes == 0

    run_with_app(scenario, ServerOptions(api_key_hashes=(hash_key("one"), hash_key("other"))))


@pytest.mark.parametrize("stream", [True, False])
def test_a_response_that_runs_can_be_seen_and_cancelled(stream: bool) -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, serving: Serving) -> None:
        llm.gate.clear()
        running = asyncio.create_task(client.post(PATH, {"input": "Hi", "stream": stream}))
        await llm.started.wait()
        (response_id,) = serving.responses.store._records
        path = f"{PATH}/{response_id}"
        assert (await client.get(path)).json["status"] == "in_progress"
        follow = await client.post(PATH, {"input": "Hi", "previous_response_id": response_id})
        assert (follow.status, follow.error["param"]) == (400, "previous_response_id")
        for method, target in (("DELETE", path), ("GET", f"{path}/input_items")):
            assert (await client.call(method, target, b"", {})).error["code"] == "invalid_state"
        cancelled = await client.call("POST", f"{path}/cancel", b"", {})
        assert (cancelled.status, cancelled.json["status"]) == (200, "cancelled")
        answer = await running
        ended = answer.events[-1]["response"] if stream else answer.json
        assert llm.aborted == {response_id}
        if stream:
            assert (ended["status"], answer.events[-1]["type"]) == ("cancelled", "response.incomplete")
        assert (await client.get(path)).json == ended

    run_with_app(scenario)


def test_a_response_whose_client_leaves_is_not_kept() -> None:
    async def scenario(llm: FakeLLM, client: AsgiClient, serving: Serving) -> None:
        llm.gate.clear()
        running = asyncio.create_task(client.post(PATH, {"input": "Hi", "stream": True}))
        await llm.started.wait()
        assert len(serving.responses.store) == 1
        client.leave()
        await running
        assert len(serving.responses.store) == 0

    run_with_app(scenario)


def test_a_server_that_keeps_nothing_says_so() -> None:
    async def scenario(_llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        made = (await client.post(PATH, {"input": "Hi"})).json
        assert made["store"] is False
        gone = await client.get(f"{PATH}/{made['id']}")
        assert gone.status == 404
        assert "max_stored_bytes=0" in gone.error["message"]

    run_with_app(scenario, ServerOptions(limits=Limits(max_stored_bytes=0)))


def test_a_conversation_that_has_become_too_large_is_refused() -> None:
    async def scenario(_llm: FakeLLM, client: AsgiClient, _: Serving) -> None:
        made = (await client.post(PATH, {"input": "Hi " * 20})).json
        answer = await client.post(PATH, {"input": "Hi", "previous_response_id": made["id"]})
        assert (answer.status, answer.error["param"]) == (400, "previous_response_id")
        assert "max_body_bytes" in answer.error["message"]

    run_with_app(scenario, ServerOptions(limits=Limits(max_body_bytes=150)))
