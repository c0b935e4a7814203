"""OpenAI's own client, and raw sockets, against `quire serve` with the pocket model."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

COMMAND = [sys.executable, "-m", "quire", "serve", "--port", "0", "--log-level", "WARNING"]
TIMEOUT_S = 60.0
SUM = [{"role": "user", "content": "What is 12 plus 30?"}]
ENDLESS: dict[str, Any] = {"max_tokens": 1900, "extra_body": {"ignore_eos": True}}


class Served:
    """A `quire serve` process, ready, with what it printed."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, *arguments], stdout=subprocess.PIPE, text=True, env=os.environ | (env or {})
        )
        self.box = ""
        reader = threading.Thread(target=self._read_box)
        reader.start()
        reader.join(TIMEOUT_S)
        found = re.search(r"http://127\.0\.0\.1:(\d+)", self.box)
        assert found, self.box
        self.port = int(found[1])
        self.url = f"http://127.0.0.1:{self.port}"

    def _read_box(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.box += line
            if line.strip().startswith("curl "):
                return

    def client(self, api_key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=TIMEOUT_S)

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=TIMEOUT_S) as answer:
            return json.load(answer)

    def wait_until_idle(self) -> Any:
        """The engine's stats once nothing runs and every block is free again, within 5 s."""
        deadline = time.monotonic() + 5
        while True:
            stats = self.get("/stats")["stats"]
            if stats["num_running"] + stats["num_waiting"] + stats["kv_blocks_used"] == 0:
                return stats
            assert time.monotonic() < deadline, stats

    def stop(self) -> int:
        """End with SIGTERM; the exit code."""
        assert self.process.stdout is not None
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(10)
        _, alive = psutil.wait_procs(children, timeout=5)
        assert not alive, "a process outlived the server"
        self.process.stdout.close()
        return code


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    server = Served()
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with served.client() as made:
        yield made


def test_a_chat_is_answered_and_the_usage_counts_cached_tokens(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Tell me a story about a fox. " * 4}]
    first, second = (
        client.chat.completions.create(model="pocket", messages=messages, max_tokens=8) for _ in range(2)
    )
    assert first.choices[0].message.role == "assistant"
    assert first.usage is not None
    assert first.usage.total_tokens == first.usage.prompt_tokens + 8
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens >= 16


def test_a_sum_is_right_whole_and_streamed_and_by_the_responses_api(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="pocket", messages=SUM, temperature=0)
    assert "42" in (whole.choices[0].message.content or "")
    assert whole.choices[0].finish_reason == "stop"
    stream = client.chat.completions.create(
        model="pocket", messages=SUM, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )
    answer = client.responses.create(model="pocket", input="What is 12 plus 30?", temperature=0)
    assert answer.status == "completed"
    assert answer.output_text == text
    with client.responses.stream(model="pocket", input="What is 12 plus 30?", temperature=0) as events:
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(deltas) == events.get_final_response().output_text == text


def test_n_gives_answers_that_differ_and_a_seed_repeats_them(client: openai.OpenAI) -> None:
    def ask(seed: int) -> list[str | None]:
        answer = client.completions.create(
            model="pocket", prompt="Once upon a time", n=3, seed=seed, max_tokens=20, temperature=1.0
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.text for choice in answer.choices]

    first = ask(7)
    assert len(set(first)) == 3
    assert ask(7) == first
    assert ask(8) != first
    stream = client.completions.create(
        model="pocket", prompt="Once upon a time", n=3, seed=7, max_tokens=20, temperature=1.0, stream=True
    )
    texts = ["", "", ""]
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == first


def test_logprobs_are_of_the_tokens_that_came(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="pocket", messages=SUM, temperature=0, logprobs=True, top_logprobs=3
    )
    assert answer.choices[0].logprobs is not None
    entries = answer.choices[0].logprobs.content or []
    assert "".join(entry.token for entry in entries).startswith(answer.choices[0].message.content or "?")
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token
        assert entry.logprob <= 0
    echoed = client.completions.create(
        model="pocket", prompt="Once upon a time", echo=True, max_tokens=0, logprobs=1
    )
    logprobs = echoed.choices[0].logprobs
    assert echoed.choices[0].text == "Once upon a time" == "".join(logprobs.tokens)
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    text = echoed.choices[0].text
    assert [
        text[i:][: len(t)] for i, t in zip(logprobs.text_offset, logprobs.tokens, strict=True)
    ] == logprobs.tokens


def test_a_stop_text_ends_the_answer_and_is_left_out(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="pocket", prompt="Once upon a time", stop=["."], max_tokens=200, temperature=0
    )
    assert "." not in answer.choices[0].text
    assert answer.choices[0].finish_reason == "stop"
    biased = client.completions.create(
        model="pocket", prompt="Once", max_tokens=4, temperature=0, logit_bias={"100": 100}
    )
    assert len(set(biased.choices[0].text)) <= len(biased.choices[0].text)


def test_errors_are_raised_as_the_clients_own_kinds(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-4", messages=SUM)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as out_of_range:
        client.chat.completions.create(model="pocket", messages=SUM, temperature=9)
    assert out_of_range.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model="pocket", prompt="word " * 5000)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as bad_id:
        client.completions.create(model="pocket", prompt=[1, 99999])
    assert bad_id.value.param == "prompt"
    with pytest.raises(openai.BadRequestError) as tools:
        client.chat.completions.create(
            model="pocket", messages=SUM, tools=[{"type": "function", "function": {"name": "f"}}]
        )
    assert tools.value.param == "tools"


def test_a_stream_that_is_closed_frees_its_blocks(served: Served, client: openai.OpenAI) -> None:
    served.wait_until_idle()
    stream = client.completions.create(model="pocket", prompt="Once", stream=True, **ENDLESS)
    next(iter(stream))
    assert served.get("/stats")["stats"]["num_running"] == 1
    stream.close()
    served.wait_until_idle()


def test_a_whole_answer_whose_client_leaves_frees_its_blocks(served: Served) -> None:
    served.wait_until_idle()
    body = json.dumps({"prompt": "Once", "max_tokens": 1900, "ignore_eos": True}).encode()
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        deadline = time.monotonic() + 5
        while served.get("/stats")["stats"]["num_running"] == 0:
            assert time.monotonic() < deadline
    served.wait_until_idle()


def test_many_streams_run_at_the_same_time_and_say_what_one_alone_says(served: Served) -> None:
    async def run_all() -> None:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:

            async def tell(seed: int) -> str:
                stream = await client.completions.create(
                    model="pocket", prompt="One day", stream=True, seed=seed, max_tokens=24, temperature=1.0
                )
                return "".join([chunk.choices[0].text async for chunk in stream])

            together = await asyncio.gather(*(tell(seed % 8) for seed in range(48)))
            alone = [await tell(seed) for seed in range(8)]
            assert together == alone * 6

    asyncio.run(asyncio.wait_for(run_all(), TIMEOUT_S))


def test_the_printed_curl_line_works_as_printed(served: Served) -> None:
    line = next(line for line in served.box.splitlines() if line.strip().startswith("curl "))
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert "42" in json.loads(done.stdout)["choices"][0]["message"]["content"]


def test_models_tokenize_docs_and_metrics_answer(served: Served, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["pocket"]
    assert client.models.retrieve("pocket").id == "pocket"
    assert served.get("/openapi.json")["openapi"].startswith("3.")
    for path in ("/docs", "/metrics", "/"):
        with urllib.request.urlopen(served.url + path, timeout=TIMEOUT_S) as answer:
            assert answer.status == 200


def test_a_port_in_use_is_refused_before_the_model_loads_and_names_its_owner(served: Served) -> None:
    began = time.monotonic()
    arguments = ["-m", "quire", "serve", "--port", str(served.port)]
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert time.monotonic() - began < 5  # under 1 s on an idle machine
    assert done.returncode == 2
    assert f"pid {served.process.pid} " in done.stderr
    assert "quire serve" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--host", "0.0.0.0"], "--api-key"),
        (["--host", "no.such.host.invalid", "--insecure-no-key"], "host="),
        (["--port", "70000"], "port=70000"),
        (["--limit", "max_bdy_bytes=1"], "did you mean 'max_body_bytes'"),
        (["--limit", "max_body_bytes=0"], "max_body_bytes='0'"),
        (["--api-key-file", "/no/such/file"], "api_key_file"),
        (["--api-key", "a b"], "api_key"),
        (["--max-model-len", "0"], "max_model_len"),
    ],
)
def test_options_that_cannot_be_used_are_refused_with_exit_code_2(arguments: list[str], text: str) -> None:
    command = [*COMMAND, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 2, done.stderr
    assert text in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_help_limits_shows_the_table_with_what_was_set() -> None:
    command = [sys.executable, "-m", "quire", "serve", "--help-limits", "--limit", "max_prompts=3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0
    rows = {line.split("  ")[0]: line for line in done.stdout.splitlines()}
    assert rows["max_prompts"].split()[1] == "3"
    assert {"max_header_bytes", "max_body_bytes", "write_timeout_s", "logit_bias"} <= set(rows)


def test_keys_are_wanted_and_a_running_stream_finishes_after_sigterm(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# mine\nfrom-file\n")
    keys.chmod(0o600)
    server = Served("--api-key-file", str(keys), env={"QUIRE_API_KEY": "from-env"})
    with server.client("wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()
    with server.client("from-env") as client:
        client.models.list()
    with server.client("from-file") as client:
        stream = client.completions.create(
            model="pocket", prompt="Once", stream=True, **(ENDLESS | {"max_tokens": 400})
        )
        chunks = iter(stream)
        next(chunks)
        server.process.send_signal(signal.SIGTERM)
        last = [chunk.choices[0].finish_reason for chunk in chunks][-1]
        assert last == "length"
    assert server.process.wait(10) == 0
    assert server.process.stdout is not None
    server.process.stdout.close()
