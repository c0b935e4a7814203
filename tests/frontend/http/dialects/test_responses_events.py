"""Events of an answer -> items and events of a response, which openai-python's own types accept."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter
from quire.frontend.events import (
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from quire.frontend.http.bodies.responses import (
    InputTokensDetails,
    OutputTokensDetails,
    ResponsesResponse,
    ResponsesUsage,
)
from quire.frontend.http.bodies.schema import TokenLogprob
from quire.frontend.http.dialects.responses_events import ResponseEncoder, find_response_id

USAGE = ResponsesUsage(5, InputTokensDetails(0), 7, OutputTokensDetails(2), 12)
# What an answer has and openai-python's types do not name.
EXTRA = {"name", "store"}
STREAM_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TURN: list[OutputEvent] = [
    ReasoningDelta("Two "),
    ReasoningDelta("calls."),
    TextDelta("Let me "),
    TextDelta("see."),
    ToolCallStart(0, "call_a", "lookup"),
    ToolCallDelta(0, '{"key"'),
    ToolCallDelta(0, ': "x"}'),
    ToolCallEnd(0),
    ToolCallStart(1, "call_b", "now"),
    ToolCallDelta(1, "{}"),
    ToolCallEnd(1),
]


def make_encoder() -> ResponseEncoder:
    return ResponseEncoder(ResponsesResponse(id="resp-0a01", created_at=1, model="pocket"))


def encode(
    batches: list[list[OutputEvent]], finish_reason: str = "stop"
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The events of a stream, as a client decodes them, and the response in its end."""
    encoder = make_encoder()
    events = [msgspec.to_builtins(event) for event in encoder.begin()]
    for batch in batches:
        events += [msgspec.to_builtins(event) for event in encoder.take(batch)]
    events += [msgspec.to_builtins(event) for event in encoder.end(finish_reason, USAGE)]
    return events, events[-1]["response"]


def find_surprises(value: Any, place: str = "") -> list[str]:
    """Fields that a model of openai-python has been given and does not know."""
    if isinstance(value, list):
        return [name for one in value for name in find_surprises(one, place)]
    if not isinstance(value, BaseModel):
        return []
    found = [f"{place}.{name}" for name in value.__pydantic_extra__ or () if name not in EXTRA]
    for name in type(value).model_fields:
        found += find_surprises(getattr(value, name), f"{place}.{name}")
    return found


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def test_thoughts_text_and_calls_come_in_openais_order() -> None:
    events, response = encode([[event] for event in TURN])
    assert kinds(events) == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", *["reasoning_text.delta"] * 2),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", *["output_text.delta"] * 2),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", *["function_call_arguments.delta"] * 2),
        *("function_call_arguments.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    assert [item["type"] for item in response["output"]] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    call = response["output"][2]
    assert (call["call_id"], call["name"], call["arguments"]) == ("call_a", "lookup", '{"key": "x"}')
    assert response["output"][0]["content"] == [{"type": "reasoning_text", "text": "Two calls."}]


def test_numbers_places_and_ids_of_events_agree_with_the_items_at_the_end() -> None:
    events, response = encode([[event] for event in TURN])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    ids = [item["id"] for item in response["output"]]
    assert len(set(ids)) == 4
    for event in events[2:-1]:
        item_id = event["item"]["id"] if "item" in event else event["item_id"]
        assert ids[event["output_index"]] == item_id
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == response["output"]
    assert [find_response_id(item_id) for item_id in ids] == [("resp-0a01", place) for place in range(4)]
    assert [find_response_id(text) for text in ("", "msg-1", "msg-a-b", "msg-a-1-2")] == [None] * 4


@pytest.mark.parametrize("finish_reason", ["stop", "length", "abort"])
@pytest.mark.parametrize("turn", [TURN, TURN[:2], TURN[2:4], TURN[4:], []])
def test_a_stream_equals_the_whole_and_openais_types_accept_every_event(
    turn: list[OutputEvent], finish_reason: str
) -> None:
    events, streamed = encode([[event] for event in turn], finish_reason)
    _, whole = encode([turn], finish_reason)
    deltas = {"output_text", "reasoning_text", "function_call_arguments"}
    for item in streamed["output"]:
        own = [event for event in events if event.get("item_id") == item["id"]]
        told = [event["delta"] for event in own if event["type"].split(".")[1] in deltas and "delta" in event]
        assert "".join(told) == (item["arguments"] if "arguments" in item else item["content"][0]["text"])
    assert streamed == whole
    for event in events:
        assert find_surprises(STREAM_EVENT.validate_json(json.dumps(event))) == []
    assert find_surprises(Response.model_validate_json(json.dumps(whole))) == []


@pytest.mark.parametrize(
    ("finish_reason", "status", "reason"),
    [
        ("stop", "completed", None),
        ("length", "incomplete", "max_output_tokens"),
        ("abort", "cancelled", None),
    ],
)
def test_a_response_says_how_it_ended(finish_reason: str, status: str, reason: str | None) -> None:
    events, response = encode([[TextDelta("One")]], finish_reason)
    assert kinds(events)[-1] == ("completed" if status == "completed" else "incomplete")
    assert response["status"] == status
    assert response["incomplete_details"] == (None if reason is None else {"reason": reason})
    item_status = "completed" if status == "completed" else "incomplete"
    assert [item["status"] for item in response["output"]] == [item_status]
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}


@pytest.mark.parametrize("finish_reason", ["length", "stop"])  # a stop string may cut it, too
def test_a_call_that_was_cut_off_is_not_told_as_done_with_its_arguments(finish_reason: str) -> None:
    events, response = encode([[*TURN[4:6]]], finish_reason)
    assert "function_call_arguments.done" not in kinds(events)
    assert response["output"][0] == {
        "type": "function_call",
        "id": "fc-0a01-0",
        "call_id": "call_a",
        "name": "lookup",
        "arguments": '{"key"',
        "status": "incomplete",
    }


def test_an_answer_of_nothing_is_an_empty_message() -> None:
    _, response = encode([])
    assert [item["content"][0]["text"] for item in response["output"]] == [""]


def test_logprobs_are_those_of_the_text_and_wait_for_it() -> None:
    one, two, three, four, five = (TokenLogprob(token, -0.5, [], []) for token in "abcde")
    encoder = make_encoder()
    encoder.take([ReasoningDelta("hm")], [one])
    encoder.take([ReasoningDelta(".")], [two])
    encoder.take([], [three])  # half a character
    events = encoder.take([TextDelta("\u00e9")], [four])
    told = [event.logprobs for event in events if event.type == "response.output_text.delta"]
    assert told == [[three, four]]
    encoder.take([ToolCallStart(0, "call_a", "lookup"), ToolCallEnd(0)], [one])
    encoder.take([TextDelta("!")], [two])
    encoder.take([], [five])
    encoder.end("stop", USAGE)
    first, _, last = map(msgspec.to_builtins, encoder.response.output[1:])
    assert first["content"][0]["logprobs"] == msgspec.to_builtins([three, four])
    assert last["content"][0]["logprobs"] == msgspec.to_builtins([two, five])


def test_what_fails_after_the_beginning_ends_with_its_cause() -> None:
    encoder = make_encoder()
    encoder.begin()
    encoder.take([TextDelta("One")])
    (event,) = encoder.fail("poison_request", "it kills workers")
    assert (event.type, event.sequence_number) == ("response.failed", 5)
    error = {"code": "poison_request", "message": "it kills workers"}
    failed = msgspec.to_builtins(event)["response"]
    assert (failed["status"], failed["error"]) == ("failed", error)
