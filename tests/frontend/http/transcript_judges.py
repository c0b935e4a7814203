"""Whether an answer and its stream agree, and are what OpenAI's and Anthropic's own clients take."""

from __future__ import annotations

import functools
from typing import Any, cast

import pydantic
from anthropic import types as anthropic
from openai import types as openai
from openai.types import chat, responses

Json = dict[str, Any]
# By path: the types of an answer and of a stream's events.
KINDS: dict[str, tuple[Any, Any]] = {
    "/v1/chat/completions": (chat.ChatCompletion, chat.ChatCompletionChunk),
    "/v1/completions": (openai.Completion, None),  # whose finish_reason has no null in a chunk
    "/v1/responses": (responses.Response, responses.ResponseStreamEvent),
    "/v1/messages": (anthropic.Message, anthropic.RawMessageStreamEvent),
    "/v1/messages/count_tokens": (anthropic.MessageTokensCount, None),
    "/v1/embeddings": (openai.CreateEmbeddingResponse, None),
}
# Fields of a response that OpenAI's types do not name.
EXTRA = {"name", "store", "tool_parse_error", "namespace", "bytes"}
OUR_ENDS = ("abort", "repetition")  # finish reasons that OpenAI's types do not name


def judge(turn: Json) -> None:
    """AssertionError or pydantic's ValidationError for what a client could not read."""
    lines = turn.get("stream")
    if turn["ask"] in OLLAMA and "answer" in turn and isinstance(lines, list) and "fails" not in turn:
        assert join_lines(lines) == join_lines([turn["answer"]])
    if turn["ask"] not in KINDS or turn.get("status", 200) != 200 or not is_judged(turn):
        return
    answer, event = KINDS[turn["ask"]]
    whole: Json = turn.get("answer", {})
    events: list[Any] = turn.get("stream", [])
    if whole:
        _check(whole, answer, turn["ask"])
    if not isinstance(events, list) or "fails" in turn:
        return
    for one in events:
        if event is not None and one != "[DONE]" and one.get("type") != "ping":
            _check(one, event, turn["ask"])
    if whole and events:
        assert JOINS[turn["ask"]](events) == JOINS[turn["ask"]]([whole])


def is_judged(turn: Json) -> bool:
    """Whether the types know it: no null logprobs of an echo's first token, no base64, not our own ends."""
    body: Json = turn.get("body", {})
    is_known = not body.get("echo") and body.get("encoding_format") != "base64"
    return is_known and turn.get("ends", ("",))[0] not in OUR_ENDS


_make_adapter = functools.cache(pydantic.TypeAdapter)


def _check(value: Any, kind: Any, path: str) -> None:
    is_strict = path.startswith("/v1/messages") or None
    model: Any = _make_adapter(kind).validate_python(value, strict=is_strict)
    if path == "/v1/responses":
        assert not (found := find_surprises(model)), found


def find_surprises(value: Any, place: str = "") -> list[str]:
    """Fields that a model of openai-python has been given and does not know."""
    if isinstance(value, list):
        return [name for one in cast(list[Any], value) for name in find_surprises(one, place)]
    if not isinstance(value, pydantic.BaseModel):
        return []
    found = [f"{place}.{name}" for name in value.__pydantic_extra__ or () if name not in EXTRA]
    for name in type(value).model_fields:
        found += find_surprises(getattr(value, name), f"{place}.{name}")
    return found


def join_chat(chunks: list[Any]) -> Any:
    """By choice: content, thoughts, calls and end, of chunks or of a whole answer."""
    joined: dict[int, Json] = {}
    for choice in _list_choices(chunks):
        told = joined.setdefault(choice["index"], {"content": "", "reasoning": "", "calls": []})
        delta: Json = choice["delta"] if "delta" in choice else choice["message"]
        for name in ("content", "reasoning"):
            told[name] += delta.get(name) or ""
        for number, call in enumerate(delta.get("tool_calls", [])):
            if "index" not in call or call["index"] == len(told["calls"]):
                told["calls"].append(["", ""])
            place = call.get("index", number)
            told["calls"][place][0] += call["function"].get("name", "")
            told["calls"][place][1] += call["function"].get("arguments", "")
        told |= {name: choice.get(name) for name in ("finish_reason", "stop_reason", "tool_parse_error")}
    return joined


def join_completion(chunks: list[Any]) -> Any:
    """By choice: text, logprobs of the prompt and end."""
    joined: dict[int, Json] = {}
    for choice in _list_choices(chunks):
        told = joined.setdefault(choice["index"], {"text": "", "prompt": choice.get("prompt_logprobs")})
        told["text"] += choice["text"]
        told |= {name: choice[name] for name in ("finish_reason", "stop_reason")}
    return joined


def _list_choices(chunks: list[Any]) -> list[Json]:
    return [choice for chunk in chunks if chunk != "[DONE]" for choice in chunk["choices"]]


def join_response(events: list[Any]) -> Any:
    """The output and what is said of it, without what every answer has of its own.

    Events are numbered, and each item that is done is one of the output, at its place.
    """
    if "sequence_number" in events[0]:
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert done == events[-1]["response"]["output"]
        for event in events[2:-1]:
            item_id = event["item"]["id"] if "item" in event else event["item_id"]
            assert done[event["output_index"]]["id"] == item_id
    response = events[-1].get("response", events[-1])
    output = [{k: v for k, v in one.items() if k not in ("id", "call_id")} for one in response["output"]]
    named = ("status", "incomplete_details", "tools", "text", "instructions", "error")
    return output, {name: response[name] for name in named}, response.get("tool_parse_error")


def join_message(events: list[Any]) -> Any:
    """The blocks, and what ends them."""
    if "content" in events[0]:
        blocks = [{**block, "input": block.get("input", "")} for block in events[0]["content"]]
        told = events[0]
    else:
        blocks, told = [], {}
        for event in events:
            match event:
                case {"type": "content_block_start", "index": index, "content_block": block}:
                    assert index == len(blocks)
                    blocks.append({**block, "input": ""})
                case {"type": "content_block_delta", "index": index, "delta": {"type": _, **rest}}:
                    assert index == len(blocks) - 1
                    ((name, value),) = rest.items()
                    blocks[-1]["input" if name == "partial_json" else name] += value
                case {"type": "message_delta", "delta": delta}:
                    told = delta
                case _:
                    pass
    named = ("stop_reason", "stop_sequence", "tool_parse_error")
    return [_read_block(block) for block in blocks], {name: told.get(name) for name in named}


def _read_block(block: Json) -> Json:
    """With a call's input as far as a client that takes partial JSON reads it."""
    given = block.pop("input")
    kept = {name: one for name, one in block.items() if name not in ("id", "citations")}
    if block["type"] == "tool_use":
        kept["input"] = (
            pydantic.TypeAdapter(Any).validate_json(given or "{}") if isinstance(given, str) else given
        )
    return kept


OLLAMA = ("/api/chat", "/api/generate")


def join_lines(lines: list[Any]) -> Any:
    """What the parts of an answer of Ollama's form add up to, and its end."""
    joined: Json = {"content": "", "response": "", "thinking": "", "tool_calls": []}
    for line in lines:
        part = line | line.get("message", {})
        for name in joined:
            joined[name] += part.get(name, type(joined[name])())
    joined["tool_calls"] = [call["function"] for call in joined["tool_calls"]]  # ids differ
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    untold = (*joined, "message", "logprobs")
    return joined, {name: value for name, value in lines[-1].items() if name not in untold}


JOINS = {
    "/v1/chat/completions": join_chat,
    "/v1/completions": join_completion,
    "/v1/responses": join_response,
    "/v1/messages": join_message,
}
