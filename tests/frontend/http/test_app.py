"""The routes over a scripted engine, called without sockets."""

from __future__ import annotations

import json
import weakref
from typing import Any

import pytest
from openai_fakes import CHAT, AsgiClient, FakeLLM, chat
from quire.frontend.http.bodies.schema import ChatMessage
from quire.frontend.http.caller import Caller
from quire.frontend.http.dialects.chat import ChatCompletionRequest, create_chat_completion
from quire.frontend.http.dialects.completions import CompletionRequest, create_completion
from quire.frontend.http.dialects.messages import create_message
from quire.frontend.http.dialects.messages_body import MessageParam, MessagesRequest
from quire.frontend.http.serving import Serving
from quire.frontend.http.stream import EventStream
from quire.ipc.params.sampling_params import SAMPLING_FIELDS
from quire.ipc.protocol.rights import list_open

LARGE = "x" * 100_000


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_is_named_in_its_header_as_in_its_body(
    llm: FakeLLM, client: AsgiClient, stream: bool
) -> None:
    bodies = {CHAT: chat(), "/v1/completions": {"prompt": "x"}, "/v1/responses": {"input": "x"}}
    bodies["/v1/messages"] = chat(max_tokens=1)
    for path, body in bodies.items():
        answer = await client.post(path, body | {"stream": stream})
        name = answer.headers["x-request-id"]
        assert name in answer.body.decode()
        assert llm.calls[-1].request_id.startswith(name)


async def test_every_declared_number_and_switch_reaches_the_engine(llm: FakeLLM, client: AsgiClient) -> None:
    declared = [field for field in SAMPLING_FIELDS.values() if field.kind in (int, float, bool)]
    asked = {field.name: 1 if field.kind is int else field.kind(0.5) for field in declared}
    for name in ("logprobs", "detokenize"):  # a chat's has another type; the server needs the text
        del asked[name]
    assert (await client.post(CHAT, chat(**asked))).status == 200
    assert asked == {name: getattr(llm.calls[0].params, name) for name in asked}


async def test_every_reference_of_the_openapi_document_leads_somewhere(client: AsgiClient) -> None:
    document = (await client.get("/openapi.json")).json
    names = set(document["components"]["schemas"])
    found = {part.split('"')[0] for part in json.dumps(document).split('"#/components/schemas/')[1:]}
    assert found <= names
    items = document["components"]["schemas"]["ResponsesRequest"]["properties"]["input"]["anyOf"][1]["items"]
    assert {"$ref": "#/components/schemas/FunctionCallOutputItem"} in items["anyOf"]
    assert {"ChatCompletionRequest", "CompletionRequest", "ErrorResponse"} <= found
    post = document["paths"][CHAT]["post"]
    assert {"200", "400", "401", "404", "413", "429", "503"} <= set(post["responses"])
    assert "422" not in post["responses"]
    assert "security" not in post
    assert document["paths"]["/live"]["get"]["security"] == []
    assert {"JsonSchemaFormat", "JsonSchema", "StructuredOutputsFields", "ResponsesText"} <= names
    assert "MessagesErrorResponse" in json.dumps(
        document["paths"]["/v1/messages"]["post"]["responses"]["400"]
    )
    assert {"MessagesRequest", "CountTokensRequest"} <= names
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert operation["responses"]["200"]["content"], path
            assert {"503"} <= set(operation["responses"]), path
            assert ("401" in operation["responses"]) == (path not in list_open()), path


async def test_a_stream_holds_neither_its_prompts_nor_what_else_is_large_in_its_request(
    llm: FakeLLM, serving: Serving
) -> None:
    class Texts(list[Any]):
        """Can be referred to weakly."""

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


@pytest.mark.parametrize(
    ("handle", "asked"),
    [
        (
            create_chat_completion,
            ChatCompletionRequest(
                messages=[ChatMessage(role="user", content="Hi")], stream=True, metadata={"a": LARGE}
            ),
        ),
        (
            create_message,
            MessagesRequest(
                model="fake",
                max_tokens=9,
                messages=[MessageParam("user", "Hi")],
                stream=True,
                metadata={"user_id": LARGE},
            ),
        ),
    ],
    ids=["chat", "messages"],
)
async def test_a_stream_of_a_chat_holds_nothing_large_of_its_request(
    serving: Serving, handle: Any, asked: Any
) -> None:
    response = await handle(serving, asked, Caller())
    assert isinstance(response, EventStream)
    await anext(response._events)
    assert not any((asked.messages, asked.metadata))
    assert [data async for data in response._events]
