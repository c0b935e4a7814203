"""Ollama's API beyond its transcripts: how it is sent, kept alive and ended, what its clients look for."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from openai_fakes import OpenApp, OpenApps
from quire.frontend.http.connections.auth import hash_key
from quire.frontend.http.limits import Limits
from quire.frontend.http.options import ServerOptions

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize("content_type", ["application/x-www-form-urlencoded", ""])
async def test_json_that_curl_calls_a_form_is_read(app: OpenApp, content_type: str) -> None:
    answer = await app.client.post("/api/chat", CHAT | {"stream": False}, content_type=content_type)
    assert answer.json["message"]["content"] == "Hello there!"


@pytest.mark.parametrize("sent_by_a_page", [{"origin": "http://evil.test"}, {"sec_fetch_site": "cross-site"}])
async def test_a_form_that_a_web_page_sends_is_refused(app: OpenApp, sent_by_a_page: dict[str, str]) -> None:
    headers = {"content_type": "application/x-www-form-urlencoded"} | sent_by_a_page
    answer = await app.client.post("/api/chat", CHAT, **headers)
    assert answer.status == 415
    assert answer.json["error"].startswith("content-type=")
    assert not app.llm.calls


@pytest.mark.parametrize("content_type", ["text/plain", "multipart/form-data"])
async def test_another_type_of_body_is_refused(app: OpenApp, content_type: str) -> None:
    assert (await app.client.post("/api/chat", CHAT, content_type=content_type)).status == 415


async def test_programs_read_at_the_root_what_ollamas_clients_look_for(app: OpenApp) -> None:
    answer = await app.client.get("/", accept="*/*")
    assert (answer.body, answer.headers["vary"]) == (b"Ollama is running", "accept")
    page = await app.client.get("/", accept="text/html,application/xhtml+xml")
    assert page.headers["content-type"].startswith("text/html")


@pytest.mark.app(options=ServerOptions(limits=Limits(ping_interval_s=0.05)))
async def test_a_stream_in_which_nothing_flows_sends_white_space_before_its_next_line(app: OpenApp) -> None:
    app.llm.gate.clear()
    app.llm.holds_first = True
    asyncio.get_running_loop().call_later(0.2, app.llm.gate.set)
    answer = await app.client.post("/api/chat", CHAT)
    assert answer.body.startswith(b"  ")
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answer.body.splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == "Hello there!"


async def test_a_client_that_leaves_ends_its_request(app: OpenApp) -> None:
    app.llm.gate.clear()
    asking = asyncio.ensure_future(app.client.post("/api/generate", {"model": "fake", "prompt": "Hi"}))
    await app.llm.wait_for_calls(1)
    app.client.leave()
    await app.llm.wait_for_calls(1, 1)
    await asking


async def test_a_model_without_a_chat_template_goes_on_from_a_prompt(app: OpenApp) -> None:
    app.llm.tokenizer._template = None
    asked: dict[str, Any] = {"model": "fake", "prompt": "Hi", "stream": False}
    assert (await app.client.post("/api/generate", asked)).json["response"] == "Hello there!"
    assert app.llm.calls[0].prompt == "Hi"
    refused = await app.client.post("/api/generate", asked | {"system": "Be brief."})
    assert (refused.status, refused.json["error"].partition(":")[0]) == (400, "prompt='a conversation'")


async def test_unknown_options_are_left_out_where_the_operator_says_so(open_app: OpenApps) -> None:
    app = open_app(options=ServerOptions(unknown_fields="ignore"))
    body = CHAT | {"stream": False, "options": {"new_topic_penalty": 1, "temperature": 0.5}, "metadata": {}}
    assert (await app.client.post("/api/chat", body)).status == 200
    assert app.llm.calls[0].params.temperature == 0.5


@pytest.mark.app(options=ServerOptions(api_key_hashes=(hash_key("sk-a"), hash_key("sk-b")), max_waiting=0))
async def test_keys_and_shares_hold_for_it(app: OpenApp) -> None:
    assert (await app.client.post("/api/chat", CHAT)).status == 401
    stranger = await app.client.get("/api/tags")
    assert (stranger.status, stranger.json["error"].partition(":")[0]) == (401, "authorization")
    app.llm.gate.clear()
    asked = [
        asyncio.ensure_future(app.client.post("/api/chat", CHAT, authorization="Bearer sk-a"))
        for _ in range(app.serving.max_sequences)
    ]
    await app.llm.wait_for_calls(app.serving.max_sequences)
    refused = await app.client.post("/api/generate", {"model": "fake", "prompt": "Hi"}, x_api_key="sk-a")
    assert (refused.status, refused.headers["retry-after"]) == (429, "1")
    app.llm.gate.set()
    await asyncio.gather(*asked)
    assert {call.options.tenant for call in app.llm.calls} == {hash_key("sk-a")[:16]}


@pytest.mark.parametrize(
    ("schema", "is_closed"),
    [
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, True),
        ({"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}, False),
    ],
)
async def test_a_format_has_no_properties_but_those_that_it_names(
    app: OpenApp, schema: dict[str, Any], is_closed: bool
) -> None:
    answer = await app.client.post("/api/chat", CHAT | {"format": schema, "stream": False})
    assert answer.status == 200
    assert ('"additionalProperties":false' in app.llm.calls[0].grammar.replace(" ", "")) is is_closed
