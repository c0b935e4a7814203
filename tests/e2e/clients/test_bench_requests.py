"""The requests of `vllm bench serve` by each of its backends for text, and what it reads of the answers."""

from __future__ import annotations

import http.client
import json
from typing import Any

import pytest
from served import Served

TEXTS = ["What is 12 plus 30?", "a cat sleeps", "a dog barks"]
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


def post(served: Served, path: str, body: dict[str, Any]) -> tuple[int, str, bytes]:
    """Status, X-Request-Id and body of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    headers = {"Content-Type": "application/json", "x-request-id": "benchmark-serving0"}
    if served.api_key:
        headers["Authorization"] = f"Bearer {served.api_key}"
    try:
        connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, response.getheader("x-request-id", ""), response.read()
    finally:
        connection.close()


def read_stream(data: bytes) -> tuple[str, int, dict[str, Any]]:
    """The text, how many chunks had a choice, and the usage, which is of a chunk without choices."""
    text, num_chunks, usage = "", 0, {}
    messages = [part.strip() for part in data.decode().split("\n\n") if part.strip()]
    assert messages[-1] == "data: [DONE]"
    for message in messages[:-1]:
        if message.startswith(":"):
            continue
        chunk = json.loads(message.removeprefix("data: "))
        if choices := chunk.get("choices"):
            num_chunks += 1
            text += choices[0].get("text") or choices[0].get("delta", {}).get("content") or ""
        elif found := chunk.get("usage"):
            usage = found
    return text, num_chunks, usage


@pytest.mark.parametrize("extra", [{}, {"temperature": 0.0, "top_p": 1.0, "top_k": 1, "min_p": 0.0}])
@pytest.mark.parametrize("logprobs", [None, 1])
def test_completions_stream_as_it_reads_them(
    shared_server: Served, logprobs: int | None, extra: dict[str, Any]
) -> None:
    body = {"model": "pocket", "prompt": "Once upon a time", "repetition_penalty": 1.0, "max_tokens": 16}
    body |= {"logprobs": logprobs, "ignore_eos": True} | STREAM | extra
    for prompt in ("Once upon a time", [80, 81, 82]):
        status, name, data = post(shared_server, "/v1/completions", body | {"prompt": prompt})
        assert (status, name) == (200, "benchmark-serving0"), data
        text, num_chunks, usage = read_stream(data)
        assert text
        assert num_chunks > 1
        assert usage["completion_tokens"] == 16
        assert usage["prompt_tokens"] > 0


def test_chats_stream_as_it_reads_them(shared_server: Served) -> None:
    content = [{"type": "text", "text": TEXTS[0]}]
    body: dict[str, Any] = {"model": "pocket", "messages": [{"role": "user", "content": content}]}
    status, _, data = post(
        shared_server,
        "/v1/chat/completions",
        body | {"max_completion_tokens": 16, "ignore_eos": True} | STREAM,
    )
    assert status == 200, data
    text, num_chunks, usage = read_stream(data)
    assert text
    assert num_chunks > 1
    assert usage["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/embeddings", {"input": TEXTS}),
        ("/v1/embeddings", {"input": TEXTS[0]}),
        ("/v1/embeddings", {"messages": [{"role": "user", "content": [{"type": "text", "text": TEXTS[0]}]}]}),
        ("/pooling", {"input": TEXTS[0]}),
        ("/v1/rerank", {"query": TEXTS[0], "documents": TEXTS[1:]}),
    ],
)
def test_vectors_and_ranks_come_with_the_usage_that_it_reads(
    shared_server: Served, path: str, fields: dict[str, Any]
) -> None:
    status, _, data = post(shared_server, path, {"model": "pocket", "truncate_prompt_tokens": -1} | fields)
    assert status == 200, data
    usage = json.loads(data)["usage"]
    assert usage.get("prompt_tokens", usage.get("total_tokens", 0)) > 0


def test_it_finds_the_model_and_the_metrics(shared_server: Served) -> None:
    with shared_server.client() as client:
        assert client.models.list().data[0].id == "pocket"
    connection = http.client.HTTPConnection("127.0.0.1", shared_server.port, timeout=60)
    connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {shared_server.api_key}"})
    assert connection.getresponse().status == 200
    connection.close()
