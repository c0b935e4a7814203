"""Tool loops of a client over two HTTP processes that are attached to an engine, one of which is killed."""

from __future__ import annotations

import importlib
import json
from typing import Any

import openai
import psutil
import pytest
from quire.frontend.models.model_folder import pocket_folder
from served import TIMEOUT_S, Served

# httpx or httpx2, by the client's version.
httpx: Any = importlib.import_module(openai.DefaultHttpxClient.__mro__[1].__module__.partition(".")[0])
PARAMETERS = {
    "type": "object",
    "properties": {"expression": {"type": "string", "maxLength": 20}},
    "required": ["expression"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {"type": "function", "name": "calculator", "parameters": PARAMETERS}
FIELDS: dict[str, Any] = {"model": "pocket", "tools": [TOOL], "temperature": 0, "max_output_tokens": 60}
# Of so many letters that it goes on when its process is killed.
LETTERS = {"type": "object", "properties": {"a": {"type": "string", "minLength": 1000}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "name": "long", "schema": LETTERS | {"additionalProperties": False}}
LONG: dict[str, Any] = {"model": "pocket", "text": {"format": FORMAT}, "stream": True}


def make_client(group: Served, max_retries: int) -> openai.OpenAI:
    url = f"{group.url}/v1"
    return openai.OpenAI(base_url=url, api_key="none", max_retries=max_retries, timeout=TIMEOUT_S)


def call(client: openai.OpenAI) -> Any:
    """A response that calls the tool."""
    response = client.responses.create(input="What is 12 plus 30?", tool_choice="required", **FIELDS)
    (item,) = response.output[:1]
    assert item.type == "function_call"
    assert set(json.loads(item.arguments)) == {"expression"}
    return response


def answer(client: openai.OpenAI, called: Any) -> Any:
    """The response to the tool's result, by the id of the one that has called."""
    results: Any = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "42"}
        for item in called.output
        if item.type == "function_call"
    ]
    said = client.responses.create(
        input=results, previous_response_id=called.id, tool_choice="none", **FIELDS
    )
    assert [item.type for item in said.output] == ["message"]
    assert "<tool_call>" not in said.output_text
    return said


def find_place(response: Any) -> int:
    """Which process has made a response."""
    return int(response.id[-2:], 16)


@pytest.mark.slow
def test_loops_go_on_when_an_http_process_is_killed_and_only_what_it_held_is_lost(
    shared_server: Served,
) -> None:
    if "tools" not in (pocket_folder() / "chat_template.jinja").read_text():
        pytest.skip("the pocket model's template shows no tools")
    group = Served("--attach", f"serve-{shared_server.port}", "--api-server-count", "2")
    try:
        children = sorted(psutil.Process(group.process.pid).children(), key=lambda child: child.pid)
        http = [child for child in children if child.cmdline()[-1] == "http"]
        kept: dict[int, Any] = {}
        while len(kept) < 2:  # the kernel gives a connection to one process or the other
            with make_client(group, 0) as client:
                called = call(client)
                kept[find_place(called)] = called
                text = answer(client, called).output_text
        with make_client(group, 0) as client:
            events = iter(client.responses.create(input="Hi", **LONG))
            running = next(events).response
            assert any(event.type == "response.output_text.delta" for event in events)
            killed = find_place(running)
            http[killed].kill()
            http[killed].wait(10)
            with pytest.raises((openai.APIError, httpx.HTTPError)):
                for _ in events:
                    pass
        with make_client(group, 8) as client:  # retries, until a process is there
            assert answer(client, call(client)).output_text == text
            assert answer(client, kept[1 - killed]).output_text == text
            with pytest.raises(openai.BadRequestError, match="in the memory of the process that made it"):
                answer(client, kept[killed])
        shared_server.wait_until_idle()  # what the killed one had asked for has ended
    finally:
        assert group.stop() == 0
