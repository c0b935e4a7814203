"""A turn as Anthropic's blocks, judged by the types of Anthropic's own client."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire.frontend.events import (
    AssistantMessage,
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from quire.frontend.http.dialects.messages import BlockWriter, collect_blocks
from quire.frontend.http.stream import Json


def write(turn: list[OutputEvent], shows_thinking: bool = True) -> list[Json]:
    writer = BlockWriter(shows_thinking)
    return [event for part in turn for event in writer.take(part)] + writer.end()


def as_json(value: Any) -> Any:
    return json.loads(msgspec.json.encode(value))


@pytest.mark.parametrize(
    ("arguments", "known"),
    [
        ("", {}),
        ('{"a"', {}),
        ('{"a": 12', {}),
        ('{"a": 12, "b": "x', {"a": 12, "b": "x"}),
        (r'{"a": "x\u00', {"a": "x"}),
        (r'{"a": "\u00', {}),
        ('{"a": "x", "b', {"a": "x"}),
        ('{"a": "x", "b": tru', {"a": "x"}),
        (r'{"a": "}, \" {[", "b', {"a": '}, " {['}),
        ('{"a": {"b": [1, [2], "', {"a": {"b": [1, [2]]}}),
        ('{"a": {}', {"a": {}}),
        ('{"a": 1}', {"a": 1}),
    ],
)
def test_a_call_that_is_cut_off_is_streamed_and_whole_as_far_as_it_went(
    arguments: str, known: dict[str, Any]
) -> None:
    cut = [TextDelta("So: "), ToolCallStart(0, "call_1", "f"), ToolCallDelta(0, arguments)]
    assert as_json(write(cut))[-1] == {"type": "content_block_stop", "index": 1}
    blocks = as_json(collect_blocks(write(cut)))
    assert [block["type"] for block in blocks] == ["text", "tool_use"]
    assert blocks[1]["input"] == known
    writer = BlockWriter()
    for event in cut:
        writer.take(event)
    assert not writer.has_called


JSON = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60)
@given(st.data())
def test_a_streamed_input_is_the_whole_one_however_it_is_cut(data: st.DataObject) -> None:
    value = data.draw(st.dictionaries(st.text(max_size=4), JSON, max_size=4))
    text = json.dumps(
        value, ensure_ascii=data.draw(st.booleans()), indent=data.draw(st.sampled_from([None, 1]))
    )
    end = data.draw(st.integers(0, len(text)))
    pieces = [text[:end][start : start + 3] for start in range(0, end, 3)]
    turn = [ToolCallStart(0, "call_1", "f"), *(ToolCallDelta(0, piece) for piece in pieces)]
    if end == len(text) and data.draw(st.booleans()):
        turn.append(ToolCallEnd(0))
    events = as_json(write(turn))
    told = "".join(event["delta"]["partial_json"] for event in events if "delta" in event)
    assert json.loads(told or "{}") == as_json(collect_blocks(write(turn)))[0]["input"]
    if end == len(text):
        assert told == text


PIECES = st.one_of(
    st.builds(TextDelta, st.text("a \n", max_size=3)),
    st.builds(ReasoningDelta, st.text("b \n", max_size=3)),
    st.just("call"),
)


@given(st.lists(PIECES, max_size=8))
def test_nothing_is_lost_but_white_space_beside_other_blocks(pieces: list[Any]) -> None:
    turn: list[OutputEvent] = []
    whole = AssistantMessage()
    for index, piece in enumerate(pieces):
        name = f"call_{index}"
        arguments = f'{{"x": {index}}}'
        call = [ToolCallStart(index, name, "f"), ToolCallDelta(index, arguments), ToolCallEnd(index)]
        turn += call if piece == "call" else [piece]
    for event in turn:
        if isinstance(event, (TextDelta, ReasoningDelta)):
            whole.add(event)
    blocks = as_json(collect_blocks(write(turn)))
    told = "".join(block.get("text", "") for block in blocks)
    assert "".join(told.split()) == "".join(whole.content.split())
    assert "".join(block.get("thinking", "") for block in blocks) == whole.reasoning
    assert sum(block["type"] == "tool_use" for block in blocks) == pieces.count("call")
