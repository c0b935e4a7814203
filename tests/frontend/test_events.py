from quire.frontend.events import (
    AssistantMessage,
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolCall,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)


def test_events_add_up_to_a_message() -> None:
    message = AssistantMessage()
    events: list[OutputEvent] = [
        ReasoningDelta("two "),
        ReasoningDelta("sums"),
        TextDelta("I will add."),
        ToolCallStart(0, "call_a", "add"),
        ToolCallDelta(0, '{"a": 1'),
        ToolCallDelta(0, "}"),
        ToolCallEnd(0),
        ToolCallStart(1, "call_b", "now"),
        ToolCallDelta(1, "{}"),
        ToolCallEnd(1),
    ]
    for event in events:
        message.add(event)
    calls = [ToolCall("call_a", "add", '{"a": 1}'), ToolCall("call_b", "now", "{}")]
    assert message == AssistantMessage("I will add.", "two sums", calls)
