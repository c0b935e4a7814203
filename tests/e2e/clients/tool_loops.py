"""Agents on the pocket model with OpenAI's Python client: calls are run, results come back, answers use them.

More of scenarios.py, by its rules: `python tool_loops.py BASE_URL API_KEY` runs them all.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import openai
from local_tools import DESCRIPTIONS, QUESTION, RESULT, SCHEMAS, TWO_QUESTIONS, run_tool
from scenarios import MODEL, SCENARIOS, main, raised, scenario

FUNCTIONS: Any = [
    {"name": name, "description": DESCRIPTIONS[name], "parameters": schema}
    for name, schema in SCHEMAS.items()
]
TOOLS: Any = [{"type": "function", "function": function} for function in FUNCTIONS]


def call_tool(call: Any) -> str:
    """What a call of either API returns."""
    return run_tool(call.name, json.loads(call.arguments))


def chat(client: openai.OpenAI, messages: list[Any], **fields: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=messages, temperature=0, **fields)


def stream_chat(client: openai.OpenAI, messages: list[Any], **fields: Any) -> Any:
    """The choice that the client's own accumulator makes of a stream."""
    helper = client.chat.completions.stream(model=MODEL, messages=messages, temperature=0, **fields)
    with helper as stream:
        return stream.get_final_completion()


@scenario
def tools_chat_loop(client: openai.OpenAI) -> None:
    for ask in (chat, stream_chat):
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        choice = ask(client, messages, tools=TOOLS).choices[0]
        assert choice.finish_reason == "tool_calls"
        [call] = choice.message.tool_calls
        assert call.type == "function"
        assert call.id
        assert not choice.message.content
        result = call_tool(call.function)
        assert result == RESULT
        messages.append(choice.message.model_dump(exclude_none=True, exclude={"parsed"}))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        answer = ask(client, messages, tools=TOOLS).choices[0]
        assert answer.finish_reason == "stop"
        assert RESULT in answer.message.content


@scenario
def tools_chat_two_calls(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": TWO_QUESTIONS}]
    message = chat(client, messages, tools=TOOLS).choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["calculator", "lookup"]
    assert len({call.id for call in message.tool_calls}) == 2
    messages.append(message)
    for call in message.tool_calls:
        result = call_tool(call.function)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    content = chat(client, messages, tools=TOOLS).choices[0].message.content
    assert RESULT in content
    assert "Paris" in content
    one = chat(client, messages[:1], tools=TOOLS, parallel_tool_calls=False).choices[0].message
    assert len(one.tool_calls) == 1


@scenario
def tools_chat_stream_deltas(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    whole = chat(client, messages, tools=TOOLS).choices[0].message.tool_calls[0].function
    chunks = list(chat(client, messages, tools=TOOLS, stream=True))
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert deltas[0].function.name == whole.name
    assert deltas[0].id
    assert all(delta.id is None and delta.function.name is None for delta in deltas[1:])
    assert deltas  # a slow client gets several tokens in one
    assert "".join(delta.function.arguments for delta in deltas) == whole.arguments
    assert not any(chunk.choices[0].delta.content for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@scenario
def tools_chat_choice(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Tell me a story about a fox."}]
    none = chat(client, messages, tools=TOOLS, tool_choice="none").choices[0]
    assert not none.message.tool_calls
    assert none.message.content
    for choice, names in (
        ("required", {"calculator", "lookup"}),
        ({"type": "function", "function": {"name": "lookup"}}, {"lookup"}),
    ):
        calls = chat(client, messages, tools=TOOLS, tool_choice=choice).choices[0].message.tool_calls
        assert {call.function.name for call in calls} <= names
        for call in calls:
            assert set(json.loads(call.function.arguments)) <= {"expression", "key"}


@scenario
def tools_responses_loop(client: openai.OpenAI) -> None:
    tools = [{"type": "function", "strict": True, **function} for function in FUNCTIONS]
    fields: dict[str, Any] = {"model": MODEL, "tools": tools, "temperature": 0}
    first = client.responses.create(input=QUESTION, **fields)
    [call] = [item for item in first.output if item.type == "function_call"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": call_tool(call)}
    stored = client.responses.create(input=[result], previous_response_id=first.id, **fields)
    assert RESULT in stored.output_text
    said: Any = [{"role": "user", "content": QUESTION}, *first.output, result]
    assert client.responses.create(input=said, **fields).output_text == stored.output_text
    with client.responses.stream(input=QUESTION, **fields) as stream:
        events = [event.type for event in stream]
        [again] = [item for item in stream.get_final_response().output if item.type == "function_call"]
    assert "response.function_call_arguments.delta" in events
    assert (again.name, again.arguments) == (call.name, call.arguments)
    assert client.responses.retrieve(first.id).id == first.id
    client.responses.delete(first.id)
    raised(openai.NotFoundError, lambda: client.responses.retrieve(first.id))


@scenario
def tools_errors(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    bad_name: Any = [{"type": "function", "function": {"name": "no name"}}]
    for fields, place in (
        ({"tools": bad_name}, "name"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "calculator"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "other"),
        ({"tool_choice": "required"}, "tool"),
    ):
        error = raised(openai.BadRequestError, lambda given=fields: chat(client, messages, **given))
        assert place in str(error)


@scenario
def thinking_chat(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "What is 12 plus 30?"}]
    thinks = {"chat_template_kwargs": {"enable_thinking": True}}
    answer = chat(client, messages, extra_body=thinks)
    message = answer.choices[0].message
    assert message.reasoning_content
    assert message.reasoning == message.reasoning_content
    assert "42" in message.content
    assert "<think>" not in message.content
    assert answer.usage.completion_tokens_details.reasoning_tokens > 0
    chunks = list(chat(client, messages, extra_body=thinks, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    thoughts = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert thoughts == message.reasoning_content
    assert "".join(delta.content or "" for delta in deltas) == message.content
    hidden = chat(client, messages, extra_body=thinks | {"include_reasoning": False}).choices[0].message
    assert not getattr(hidden, "reasoning_content", None)
    assert hidden.content == message.content


if __name__ == "__main__":
    assert SCENARIOS
    sys.exit(main())
