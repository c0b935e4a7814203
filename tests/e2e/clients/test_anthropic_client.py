"""Anthropic's client for Python against `quire serve` with the pocket model and an API key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from served import TIMEOUT_S, Served

anthropic = pytest.importorskip("anthropic", reason="the client under test: pip install -e '.[test]'")

ASKED: dict[str, Any] = {
    "model": "pocket",
    "max_tokens": 40,
    "system": [{"type": "text", "text": "You are helpful.", "cache_control": {"type": "ephemeral"}}],
    "messages": [{"role": "user", "content": "What is 12 plus 30?"}],
    "extra_body": {"temperature": 0},
}


def make_client(served: Served, **credentials: str) -> Any:
    return anthropic.Anthropic(base_url=served.url, max_retries=0, timeout=TIMEOUT_S, **credentials)


@pytest.fixture
def client(shared_server: Served) -> Iterator[Any]:
    with make_client(shared_server, api_key=shared_server.api_key) as made:
        yield made


def test_a_stream_adds_up_to_the_whole_message_and_counts_its_tokens(client: Any) -> None:
    whole = client.messages.create(**ASKED)
    (block,) = whole.content
    assert "42" in block.text
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
    stopped = client.messages.create(**ASKED, stop_sequences=["42"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "42")
    schema = {
        "type": "object",
        "properties": {"n": {"const": 7}},
        "required": ["n"],
        "additionalProperties": False,
    }
    output = {"format": {"type": "json_schema", "schema": schema}}
    assert json.loads(client.messages.create(**ASKED, output_config=output).content[0].text) == {"n": 7}
    begun = [*ASKED["messages"], {"role": "assistant", "content": "12 plus 30 is 4"}]
    assert client.messages.create(**ASKED | {"messages": begun}).content[0].text.startswith("2")


def test_refusals_are_the_clients_own_errors(shared_server: Served, client: Any) -> None:
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
