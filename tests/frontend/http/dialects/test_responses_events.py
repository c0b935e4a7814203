"""Logprobs in the events of a response; the rest is in the transcripts."""

from __future__ import annotations

import msgspec
from quire.frontend.events import ReasoningDelta, TextDelta, ToolCallEnd, ToolCallStart
from quire.frontend.http.bodies.schema import TokenLogprob
from quire.frontend.http.dialects.responses_events import ResponseEncoder


def test_logprobs_are_those_of_the_text_and_wait_for_it() -> None:
    one, two, three, four, five = (TokenLogprob(token, -0.5, [], []) for token in "abcde")
    encoder = ResponseEncoder({"id": "resp-0a01", "output": []})
    encoder.take([ReasoningDelta("hm")], [one])
    encoder.take([ReasoningDelta(".")], [two])
    encoder.take([], [three])  # half a character
    events = encoder.take([TextDelta("\u00e9")], [four])
    told = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert told == [[three, four]]
    encoder.take([ToolCallStart(0, "call_a", "lookup"), ToolCallEnd(0)], [one])
    encoder.take([TextDelta("!")], [two])
    encoder.take([], [five])
    encoder.end("stop", {})
    first, _, last = map(msgspec.to_builtins, encoder.response["output"][1:])
    assert first["content"][0]["logprobs"] == msgspec.to_builtins([three, four])
    assert last["content"][0]["logprobs"] == msgspec.to_builtins([two, five])
