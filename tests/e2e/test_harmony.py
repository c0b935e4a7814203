"""gpt-oss' layers and format over HTTP: thoughts, calls and their results, whatever the weights say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from served import Served
from tool_model import make_harmony_model

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
USER = {"role": "user", "content": "How warm is it in Rome?"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}
# Thoughts of random weights have no end of their own.
FIELDS: dict[str, Any] = {"model": "oss", "max_tokens": 150, "thinking_token_budget": 6, "temperature": 1.0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = make_harmony_model(tmp_path_factory.mktemp("harmony") / "oss")
    options = ("--served-model-name", "oss", "--dtype", "float32", "--max-model-len", "1024")
    server = Served(str(folder), *options)
    yield server
    assert server.stop() == 0


def ask(server: Served, path: str, **fields: Any) -> Any:
    answer = server.ask(path, fields if "tokenize" in path else FIELDS | fields)
    assert answer.status == 200, answer.json
    return answer.json


def check_arguments(arguments: Any) -> None:
    assert arguments["city"] in ("Rome", "Oslo")
    assert arguments["days"] in (1, 2, 3)
    assert set(arguments) == {"city", "days"}


def test_calls_come_with_thoughts_and_go_back_with_results(server: Served) -> None:
    thoughts, num_calls = list[str](), 0
    for seed in range(12):
        answer = ask(
            server, "/v1/chat/completions", messages=[USER], tools=[TOOL], tool_choice="required", seed=seed
        )
        (choice,) = answer["choices"]
        message = choice["message"]
        if choice["finish_reason"] != "tool_calls":  # white space without end
            continue
        num_calls += 1
        (call,) = message["tool_calls"]
        assert (call["function"]["name"], message["content"] or "") == ("weather", "")
        check_arguments(json.loads(call["function"]["arguments"]))
        if said := message.get("reasoning_content"):
            thoughts.append(said)
        result = {"role": "tool", "tool_call_id": call["id"], "content": "21"}
        history = {"messages": [USER, message, result], "tools": [TOOL]}
        prompt = ask(server, "/detokenize", tokens=ask(server, "/tokenize", **history)["tokens"])["prompt"]
        arguments = json.dumps(json.loads(call["function"]["arguments"]))
        analysis = f"<|start|>assistant<|channel|>analysis<|message|>{said}<|end|>" if said else ""
        assert prompt.endswith(
            f"How warm is it in Rome?<|end|>{analysis}<|start|>assistant to=functions.weather"
            f"<|channel|>commentary json<|message|>{arguments}<|call|><|start|>functions.weather to=assistant"
            '<|channel|>commentary<|message|>"21"<|end|><|start|>assistant'
        )
        assert ask(server, "/v1/chat/completions", **history, seed=seed)["choices"]
    assert num_calls > 6
    assert thoughts


def test_an_answer_of_a_schema_comes_in_the_final_channel(server: Served) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    ended = list[dict[str, Any]]()
    for seed in range(8):
        answer = ask(server, "/v1/chat/completions", messages=[USER], response_format=form, seed=seed)
        if answer["choices"][0]["finish_reason"] == "stop":
            ended.append(answer["choices"][0]["message"])
    for message in ended:
        check_arguments(json.loads(message["content"]))
    assert any(message.get("reasoning_content") for message in ended)


def test_responses_and_messages_read_the_same_format(server: Served) -> None:
    tool = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
    body = {"model": "oss", "input": "How warm?", "tools": [tool], "tool_choice": "required"}
    seeds = range(4)
    responses = [server.ask("/v1/responses", body | {"max_output_tokens": 150, "seed": s}) for s in seeds]
    calls = [item for each in responses for item in each.json["output"] if item["type"] == "function_call"]
    for call in calls:
        if call["status"] == "completed":
            check_arguments(json.loads(call["arguments"]))
    tool = {"name": "weather", "input_schema": SCHEMA}
    body = {
        "model": "oss",
        "max_tokens": 150,
        "messages": [USER],
        "tools": [tool],
        "tool_choice": {"type": "any"},
    }
    answers = [server.ask("/v1/messages", body | {"seed": seed}).json for seed in seeds]
    used = [part for each in answers if each["stop_reason"] == "tool_use" for part in each["content"]]
    for part in used:
        if part["type"] == "tool_use":
            check_arguments(part["input"])
    assert calls
    assert used
