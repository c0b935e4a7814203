"""What clients of other servers send and look for: harmless and unknown fields, null, names, small routes."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from openai_fakes import AsgiClient, FakeLLM
from quire.frontend.http.bodies.schema import SilentFields
from quire.frontend.http.dialects.chat import ChatCompletionRequest
from quire.frontend.http.dialects.completions import CompletionRequest
from quire.frontend.http.dialects.responses_body import ResponsesRequest
from quire.frontend.http.options import ServerOptions
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


@pytest.mark.parametrize("path", BODIES)
async def test_a_field_that_is_null_is_as_if_it_were_not_there(
    llm: FakeLLM, client: AsgiClient, path: str
) -> None:
    absent = {name: None for name in KINDS[path].__struct_fields__ if name not in BODIES[path]}
    plain, nulls = [(await client.post(path, BODIES[path] | more)).json for more in ({}, absent)]
    assert nulls.keys() == plain.keys()
    assert nulls["usage"] == plain["usage"]
    first, second = (msgspec.structs.asdict(call.params) for call in llm.calls)
    assert first == second


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.app(template=TEMPLATE, max_model_len=1024)
async def test_an_unknown_field_that_is_null_is_as_absent_at_any_depth(client: AsgiClient, path: str) -> None:
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
    answer = await client.post(path, body)
    assert answer.status == 200, answer.body
    refused = await client.post(path, body | {"other": 1})
    assert (refused.status, refused.error["param"]) == (400, "other")
    assert (await client.post(path, body | {"stop": 5})).error["param"] == "stop"
    long = await client.post(path, body | {"user": None, "cache_salt": "x" * 70_000, "other": None})
    assert long.error["param"] == "cache_salt"


@pytest.mark.parametrize("path", BODIES)
async def test_fields_that_say_nothing_about_the_answer_are_taken(client: AsgiClient, path: str) -> None:
    given: dict[type, Any] = {str: "x", bool: False, int: 3, dict: {"a": "b"}}
    kinds = msgspec.inspect.multi_type_info([SilentFields])[0].fields
    fields = {
        one.encode_name: given[_python_type(one.type)]
        for one in kinds  # each is something, or null
    }
    assert len(fields) == len(SilentFields.__struct_fields__)
    answer = await client.post(path, BODIES[path] | fields)
    assert answer.status == 200, answer.body


def _python_type(info: Any) -> type:
    (inner,) = (one for one in info.types if not isinstance(one, msgspec.inspect.NoneType))
    names = {"Str": str, "Bool": bool, "Int": int, "Dict": dict}
    return names[type(inner).__name__.removesuffix("Type")]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_has_the_request_id_that_its_caller_gave_in_a_header_or_in_the_body(
    llm: FakeLLM, client: AsgiClient, stream: bool
) -> None:
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
        assert (await client.post(CHAT, body, **{"x-request-id": "mine"})).headers["x-request-id"] == "mine"


async def test_the_load_counts_the_requests_under_way(llm: FakeLLM, client: AsgiClient) -> None:
    loads = [(await client.get("/load")).json]
    llm.gate.clear()
    running = asyncio.create_task(client.post(CHAT, BODIES[CHAT]))
    await llm.started.wait()
    loads.append((await client.get("/load")).json)
    llm.gate.set()
    await running
    loads.append((await client.get("/load")).json)
    assert loads == [{"server_load": number} for number in (0, 1, 0)]


async def test_a_server_tells_what_it_was_started_with_but_no_secrets(
    client: AsgiClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "secret")
    monkeypatch.setenv("QUIRE_SOMETHING", "plain")
    text = (await client.get("/server_info")).json
    assert isinstance(text["vllm_config"], str)
    info = (await client.get("/server_info?config_format=json")).json
    assert info["vllm_config"]["models"]["fake"]["max_model_len"] == 128
    assert info["vllm_config"]["server"]["unknown_fields"] == "refuse"
    assert info["vllm_env"].get("QUIRE_SOMETHING") == "plain"
    assert "secret" not in str(info)
    assert not any("hash" in name for name in info["vllm_config"]["server"])


@pytest.mark.app(options=ServerOptions(enable_tokenizer_info_endpoint=True))
async def test_the_tokenizer_tells_its_settings_only_where_the_operator_wants_it(client: AsgiClient) -> None:
    info = (await client.get("/tokenizer_info")).json
    assert isinstance(info["tokenizer_class"], str)
    assert "<|im_start|>" in info["chat_template"]
    assert all(isinstance(value, str) for name, value in info.items() if name.endswith("_token") and value)
