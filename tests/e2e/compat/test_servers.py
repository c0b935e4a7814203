"""Models, metrics, health, load, versions, headers, and clients that leave."""

from __future__ import annotations

import contextlib
import json
import socket
from importlib.metadata import version

import pytest
from served import Ask, Served

CHAT = {"messages": [{"role": "user", "content": "Write a long story"}]}


def test_a_server_tells_its_version_its_health_and_its_model(ask: Ask) -> None:
    assert ask("/version").json == {"version": version("quire")}
    assert [ask(path).status for path in ("/health", "/ping")] == [200, 200]
    (card,) = ask("/v1/models").json["data"]
    assert (card["id"], card["object"], card["parent"], card["max_model_len"]) == (
        "pocket",
        "model",
        None,
        2048,
    )
    assert card["root"]
    assert ask("/v1/models/pocket").json == card
    assert ask("/v1/completions", {"model": "other", "prompt": "x"}).status == 404
    assert ask("/v1/completions", {"prompt": "x", "max_tokens": 1}).json["model"] == "pocket"


def test_a_server_tells_what_it_was_started_with(ask: Ask) -> None:
    info = ask("/server_info?config_format=json").json
    assert info["vllm_config"]["models"]["pocket"]["max_model_len"] == 2048
    assert isinstance(ask("/server_info").json["vllm_config"], str)
    assert {"python_version", "quire_version"} <= info["system_env"].keys()
    assert "sk-shared" not in json.dumps(info)


def test_only_json_is_taken(ask: Ask) -> None:
    answer = ask("/v1/chat/completions", CHAT, content_type="application/x-www-form-urlencoded")
    assert answer.status == 415
    for body in ([1], "x", None):
        assert ask("/v1/chat/completions", body if body is not None else 0).status == 400


@pytest.mark.parametrize("stream", [False, True])
def test_a_requests_own_name_comes_back(ask: Ask, stream: bool) -> None:
    body = CHAT | {"max_tokens": 1, "stream": stream}
    assert ask("/v1/chat/completions", body, x_request_id="mine").headers["x-request-id"] == "mine"
    assert ask("/v1/chat/completions", {}, x_request_id="mine").headers["x-request-id"] == "mine"
    assert ask("/v1/chat/completions", body).headers["x-request-id"].startswith("chatcmpl-")


def test_counts_of_requests_and_tokens_are_among_the_metrics(ask: Ask) -> None:
    def read(name: str) -> float:
        lines = [line for line in ask("/metrics").json.splitlines() if line.startswith(f"quire:{name}{{")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    names = ("prompt_tokens_total", "generation_tokens_total", "request_success_total")
    before = [read(name) for name in names]
    body = {"prompt": [300, 301, 302], "max_tokens": 4, "ignore_eos": True}
    assert ask("/v1/completions", body).status == 200
    assert [read(name) - old for name, old in zip(names, before, strict=True)] == [3, 4, 1]
    text = ask("/metrics").json
    for name in (
        *(
            "num_requests_running",
            "num_requests_waiting",
            "kv_cache_usage_perc",
            "prefix_cache_queries_total",
        ),
        *("time_to_first_token_seconds_bucket", "e2e_request_latency_seconds_count"),
        *("request_prompt_tokens_sum", "request_generation_tokens_bucket", "iteration_tokens_total_count"),
    ):
        assert f"quire:{name}{{" in text


def test_clients_that_do_not_wait_leave_nothing_to_do(shared_server: Served, ask: Ask) -> None:
    body = json.dumps(CHAT | {"max_tokens": 1900, "min_tokens": 1900}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"authorization: Bearer {shared_server.api_key}\r\ncontent-length: {len(body)}\r\n\r\n"
    with contextlib.ExitStack() as clients:
        for _ in range(50):
            one = clients.enter_context(socket.create_connection(("127.0.0.1", shared_server.port)))
            one.sendall(head.encode() + body)
        while ask("/load").json["server_load"] < 50:
            pass
    shared_server.wait_until_idle()
    assert ask("/load").json == {"server_load": 0}
    assert ask("/v1/chat/completions", CHAT | {"max_tokens": 2}).status == 200
