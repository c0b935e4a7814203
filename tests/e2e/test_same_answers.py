"""A request has one answer, whole or streamed, in every API: text, thoughts, calls, ends and counts."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from served import Served
from tool_model import make_tool_model

PATHS = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 40},
        "days": {"type": "integer", "minimum": 1},
        "scales": {"type": "array", "items": {"enum": ["é\n", 1.5, None]}, "minItems": 2},
    },
    "required": ["city", "days", "scales"],
    "additionalProperties": False,
}
SMALL_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
STOPS = ["the", "a", " ", "e", "I", "\n", "{", '"', "\N{REPLACEMENT CHARACTER}", "é", "an", "s and"]
# Made anew for each answer, or counted by what the prefix cache had.
VARYING = (
    "id",
    "call_id",
    "item_id",
    "created_at",
    "completed_at",
    "cached_tokens",
    "cache_read_input_tokens",
)


@pytest.fixture(scope="module", params=["tools", pytest.param("pocket", marks=pytest.mark.slow)])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = "pocket"
    if request.param == "tools":
        model = str(make_tool_model(tmp_path_factory.mktemp("tools") / "random"))
    server = Served(model, "--dtype", "float32", "--max-model-len", "1024", "--served-model-name", "m")
    yield server
    assert server.stop() == 0


def drop_varying(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: drop_varying(inner) for key, inner in value.items() if key not in VARYING}
    return [drop_varying(inner) for inner in value] if isinstance(value, list) else value


def draw_body(rng: random.Random, api: str) -> dict[str, Any]:
    length = rng.choice([1, 2, 5, 9, 30, 80])
    body: dict[str, Any] = {
        "model": "m",
        "temperature": rng.choice([0, 0.7, 1.0]),
        "seed": rng.randrange(999),
    }
    body["max_output_tokens" if api == "responses" else "max_tokens"] = length
    if rng.random() < 0.5 and api != "responses":
        body["stop_sequences" if api == "messages" else "stop"] = rng.sample(STOPS, rng.randrange(1, 4))
    if api in ("completions", "chat"):
        choices: dict[str, Any] = {
            "include_stop_str_in_output": True,
            "ignore_eos": True,
            "min_tokens": min(length, 3),
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "n": 2,
            "allowed_token_ids": [rng.randrange(1000) for _ in range(rng.choice([3, 30]))],
            "logprobs": 1 if api == "completions" else True,
        }
        body |= {name: value for name, value in choices.items() if rng.random() < 0.3}
    if api == "completions":
        return body | {"prompt": rng.choice(["Hello, ", "The 漢字", [5, 6, 200]]), "echo": rng.random() < 0.3}
    turns = [{"role": "user", "content": rng.choice(["How warm is it in Rome?", "Hi!"])}]
    body["input" if api == "responses" else "messages"] = turns
    if rng.random() < 0.7:
        body |= draw_tools(rng, api)
        body.pop("allowed_token_ids", None)  # with which a call, or the end of thoughts, may not be possible
    return body


def draw_tools(rng: random.Random, api: str) -> dict[str, Any]:
    choice = rng.choice(["auto", "required"])
    match api:
        case "messages":
            tool: dict[str, Any] = {"name": "weather", "input_schema": SCHEMA}
            choices: dict[str, Any] = {"type": choice.replace("required", "any")}
            # The pocket model, which does not think, is cut in its call.
            return {"tools": [tool], "tool_choice": choices, "max_tokens": rng.choice([20, 30, 50])}
        case "responses":
            tool = {"type": "function", "name": "weather", "parameters": SCHEMA}
        case _:
            tool = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
            few = {"max_tokens": rng.choice([20, 30, 50]), "thinking_token_budget": 2}
            return {"tools": [tool], "tool_choice": choice, **few}
    return {"tools": [tool], "tool_choice": choice}


def read_events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def add(joined: dict[str, Any], new: dict[str, Any]) -> None:
    """Put a delta to what came before it: texts and lists grow, tool calls by their index."""
    for key, value in new.items():
        match value:
            case dict():
                inner: dict[str, Any] = joined.get(key) or {}
                joined[key] = inner
                add(inner, value)
            case [{"index": _}, *_]:
                calls: dict[str, Any] = joined.setdefault(key, {})
                for call in value:
                    add(calls.setdefault(str(call["index"]), {}), call)
            case list():
                joined[key] = (joined.get(key) or []) + value
            case str() if key in ("text", "content", "reasoning", "reasoning_content", "arguments"):
                joined[key] = (joined.get(key) or "") + value
            case None:
                joined.setdefault(key)
            case _:
                joined[key] = value


def join_choices(events: list[Any]) -> dict[str, Any]:
    """As a whole answer's."""
    choices: dict[int, Any] = {}
    for event in events:
        for choice in event["choices"]:
            add(choices.setdefault(choice["index"], {}), choice)
    for choice in choices.values():
        if "delta" in choice:
            choice["message"] = choice.pop("delta")
    return {"choices": choices, "usage": events[-1]["usage"]}


def tell_choices(answer: dict[str, Any]) -> dict[str, Any]:
    choices = {choice["index"]: choice for choice in answer["choices"]}
    for choice in choices.values():
        message = choice.get("message", {})
        if calls := message.get("tool_calls"):
            message["tool_calls"] = {str(index): call | {"index": index} for index, call in enumerate(calls)}
    return {"choices": choices, "usage": answer["usage"]}


def drop_empty(value: Any) -> Any:
    """A stream leaves out what is null, and begins texts with ''."""
    if isinstance(value, dict):
        kept = {key: drop_empty(inner) for key, inner in value.items()}
        return {key: inner for key, inner in kept.items() if inner not in (None, "", [], {})}
    return value


def join_blocks(events: list[Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"content": []}
    for event in events:
        match event["type"]:
            case "content_block_start":
                message["content"].append(event["content_block"] | {"partial_json": ""})
            case "content_block_delta":
                block = message["content"][event["index"]]
                for key, value in event["delta"].items():
                    if key != "type":
                        block[key] = block[key] + value
            case "message_delta":
                message |= event["delta"] | {"output_tokens": event["usage"]["output_tokens"]}
            case _:
                pass
    for block in message["content"]:
        partial = block.pop("partial_json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(partial or "{}")
    return message


def tell_message(answer: dict[str, Any]) -> dict[str, Any]:
    told = {key: answer.get(key) for key in ("content", "stop_reason", "stop_sequence", "tool_parse_error")}
    return told | {"output_tokens": answer["usage"]["output_tokens"]}


def check_response(answer: dict[str, Any], events: list[Any]) -> None:
    assert drop_varying(events[-1]["response"]) == drop_varying(answer)
    deltas = ["" for _ in answer["output"]]
    for event in events:
        if event["type"].endswith(".delta"):
            deltas[event["output_index"]] += event["delta"]
    texts = [
        item["arguments"] if "arguments" in item else "".join(part["text"] for part in item["content"])
        for item in answer["output"]
    ]
    assert deltas == texts


@pytest.mark.parametrize("api", PATHS)
def test_a_streamed_answer_adds_up_to_the_whole_one(served: Served, api: str) -> None:
    num_answers = 0
    for seed in range(12):
        body = draw_body(random.Random(seed), api)
        options = {"stream_options": {"include_usage": True}} if api in ("completions", "chat") else {}
        whole = served.ask(PATHS[api], body)
        streamed = served.ask(PATHS[api], body | {"stream": True} | options)
        assert whole.status == streamed.status, (body, whole.json, streamed.json)
        if whole.status != 200:  # refused alike
            continue
        num_answers += 1
        events = read_events(streamed.json)
        if api == "responses":
            check_response(whole.json, events)
        elif api == "messages":
            told, joined = tell_message(whole.json), join_blocks(events)
            assert drop_empty(drop_varying(joined)) == drop_empty(drop_varying(told)), body
        else:
            told, joined = tell_choices(whole.json), join_choices(events)
            assert drop_empty(drop_varying(joined)) == drop_empty(drop_varying(told)), body
    assert num_answers > 3


def test_a_call_that_is_asked_for_is_streamed_whole_and_can_be_answered(served: Served) -> None:
    user = {"role": "user", "content": "How warm is it in Rome?"}
    with served.client() as client:
        asked: dict[str, Any] = {
            "model": "m",
            "messages": [user],
            "tools": [{"type": "function", "function": {"name": "weather", "parameters": SMALL_SCHEMA}}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "seed": 5,
            "max_tokens": 200,
            "extra_body": {"thinking_token_budget": 4},
        }
        (choice,) = client.chat.completions.create(**asked).choices
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls or []
        assert call.type == "function"
        arguments = ""
        with client.chat.completions.create(**asked, stream=True) as stream:
            for chunk in stream:
                for part in chunk.choices[0].delta.tool_calls or []:
                    assert part.function is not None
                    arguments += part.function.arguments or ""
        assert arguments == call.function.arguments
        answered: list[Any] = [
            user,
            choice.message,
            {"role": "tool", "tool_call_id": call.id, "content": "20"},
        ]
        plain: dict[str, Any] = asked | {"messages": answered, "tool_choice": "none", "max_tokens": 4}
        assert client.chat.completions.create(**plain).choices[0].finish_reason in ("stop", "length")
