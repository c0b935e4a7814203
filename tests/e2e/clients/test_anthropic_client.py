"""Anthropic's client for Python against `quire serve` with the pocket model and an API key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from quire.frontend.models.model_folder import pocket_folder
from served import TIMEOUT_S, Served

ASKED: dict[str, Any] = {
    "model": "pocket",
    "max_tokens": 40,
    "system": [{"type": "text", "text": "You are helpful.", "cache_control": {"type": "ephemeral"}}],
    "messages": [{"role": "user", "content": "What is 12 plus 30?"}],
    "extra_body": {"temperature": 0},
}


def make_client(served: Served, **credentials: str) -> Any:
    anthropic = pytest.importorskip("anthropic", reason="the client under test: pip install -e '.[test]'")
    return anthropic.Anthropic(base_url=served.url, max_retries=0, timeout=TIMEOUT_S, **credentials)


@pytest.fixture
def client(shared_server: Served) -> Iterator[Any]:
    with make_client(shared_server, api_key=shared_server.api_key) as made:
        yield made


def test_a_stream_adds_up_to_the_whole_message_and_counts_its_tokens(client: Any) -> None:
    whole = client.messages.create(**ASKED)
    (block,) = whole.content
    assert " plus 30 is " in block.text
    assert (whole.stop_reason, whole._request_id) == ("end_turn", whole.id)
    with client.messages.stream(**ASKED) as stream:
        assert "".join(stream.text_stream) == block.text
        streamed = stream.get_final_message()
    again = {"role": "user", "content": "And 1 more?"}
    for told in (whole, streamed):  # blocks come back as the client has them
        turns = [*ASKED["messages"], {"role": "assistant", "content": told.content}, again]
        assert client.messages.create(**ASKED | {"messages": turns}).stop_reason == "end_turn"
    assert streamed.usage.output_tokens == whole.usage.output_tokens > 0
    asked = {name: value for name, value in ASKED.items() if name not in ("max_tokens", "extra_body")}
    counted = client.messages.count_tokens(**asked)
    for usage in (whole.usage, streamed.usage):
        assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens


def test_a_stop_sequence_a_schema_and_a_begun_answer_are_followed(client: Any) -> None:
    stopped = client.messages.create(**ASKED, stop_sequences=[" is"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " is")
    schema = {
        "type": "object",
        "properties": {"n": {"const": 7}},
        "required": ["n"],
        "additionalProperties": False,
    }
    output = {"format": {"type": "json_schema", "schema": schema}}
    assert json.loads(client.messages.create(**ASKED, output_config=output).content[0].text) == {"n": 7}
    begun = [*ASKED["messages"], {"role": "assistant", "content": "12 plus 30 is"}]
    assert " is " not in client.messages.create(**ASKED | {"messages": begun}).content[0].text


def test_refusals_are_the_clients_own_errors(shared_server: Served, client: Any) -> None:
    import anthropic

    with make_client(shared_server, api_key="wrong") as unknown, pytest.raises(anthropic.AuthenticationError):
        unknown.messages.create(**ASKED)
    with make_client(shared_server, auth_token=shared_server.api_key) as bearer:
        assert bearer.messages.create(**ASKED | {"max_tokens": 1}).stop_reason == "max_tokens"
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**ASKED | {"model": "claude"})
    assert missing.value.request_id.startswith("req_")
    image = {"type": "image", "source": {"type": "url", "url": "https://localhost/x.png"}}
    with pytest.raises(anthropic.BadRequestError, match="type='image'"):
        client.beta.messages.create(**ASKED | {"messages": [{"role": "user", "content": [image]}]})


def test_a_tool_is_called_its_result_is_used_and_thoughts_come_before(client: Any) -> None:
    if "tools" not in (pocket_folder() / "chat_template.jinja").read_text():
        pytest.skip("the pocket model's template shows no tools")
    expression = {"type": "string", "maxLength": 20}
    schema = {"type": "object", "properties": {"expression": expression}, "required": ["expression"]}
    tool = {"name": "calculator", "description": "A calculator.", "input_schema": schema}
    asked = ASKED | {"max_tokens": 200, "tools": [tool]}
    with client.messages.stream(**asked, tool_choice={"type": "any"}) as stream:
        called = stream.get_final_message()
    whole = client.messages.create(**asked, tool_choice={"type": "any"})
    assert called.stop_reason == whole.stop_reason == "tool_use"
    calls = [block for block in called.content if block.type == "tool_use"]
    assert [block.input for block in whole.content] == [call.input for call in calls]
    assert {call.name for call in calls} == {"calculator"}
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "42"} for call in calls]
    turns = [{"role": "assistant", "content": called.content}, {"role": "user", "content": results}]
    used = client.messages.create(**asked | {"messages": [*ASKED["messages"], *turns]})
    assert (used.stop_reason, used.content[0].type) == ("end_turn", "text")
    thought = client.messages.create(**ASKED | {"max_tokens": 300}, thinking={"type": "adaptive"})
    assert [block.type for block in thought.content] == ["thinking", "text"]
    assert 0 < thought.usage.output_tokens_details.thinking_tokens < thought.usage.output_tokens
