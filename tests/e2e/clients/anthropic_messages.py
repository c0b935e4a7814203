"""Tool loops, streams and thoughts with Anthropic's client: `python anthropic_messages.py ROOT API_KEY`."""

from __future__ import annotations

import sys
from typing import Any

import anthropic
import pytest
from local_tools import DESCRIPTIONS, QUESTION, RESULT, SCHEMAS, TWO_QUESTIONS, run_tool

MODEL = "pocket"
TOOLS: Any = [
    {"name": name, "description": DESCRIPTIONS[name], "input_schema": schema}
    for name, schema in SCHEMAS.items()
]


def ask(client: anthropic.Anthropic, messages: list[Any], **fields: Any) -> anthropic.types.Message:
    """The whole answer, which a stream gives likewise."""
    given: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 300,
        "messages": messages,
        "extra_body": {"temperature": 0},
    } | fields
    whole = client.messages.create(**given)
    with client.messages.stream(**given) as stream:
        streamed = stream.get_final_message()
    assert [one.type for one in streamed.content] == [one.type for one in whole.content]
    assert streamed.stop_reason == whole.stop_reason
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    return whole


def run_loop(client: anthropic.Anthropic, question: str, num_calls: int) -> str:
    """The answer's text, once the calls have had their results."""
    messages: list[Any] = [{"role": "user", "content": question}]
    first = ask(client, messages, tools=TOOLS)
    assert first.stop_reason == "tool_use"
    calls = [one for one in first.content if one.type == "tool_use"]
    assert len(calls) == num_calls
    results = [
        {"type": "tool_result", "tool_use_id": one.id, "content": run_tool(one.name, one.input)}
        for one in calls
    ]
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    last = ask(client, messages, tools=TOOLS)
    assert last.stop_reason == "end_turn"
    [text] = last.content
    assert text.type == "text"
    return text.text


def main() -> None:
    """Raises AssertionError when an answer is not as it should be."""
    root_url, api_key = sys.argv[1:]
    client = anthropic.Anthropic(base_url=root_url, api_key=api_key, max_retries=0, timeout=60)
    sum_of = [{"role": "user", "content": "What is 12 plus 30?"}]
    plain = ask(client, sum_of, system="You are a helpful assistant.")
    assert "42" in plain.content[0].text
    assert plain.usage.input_tokens > 0
    counted = client.messages.count_tokens(
        model=MODEL, messages=sum_of, system="You are a helpful assistant."
    )
    usage = plain.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert RESULT in run_loop(client, QUESTION, 1)
    answer = run_loop(client, TWO_QUESTIONS, 2)
    assert RESULT in answer
    assert "Paris" in answer
    forced = ask(client, sum_of, tools=TOOLS, tool_choice={"type": "tool", "name": "lookup"})
    assert [one.name for one in forced.content if one.type == "tool_use"] == ["lookup"]
    thinking = {"type": "enabled", "budget_tokens": 1024}
    thought = client.messages.create(model=MODEL, max_tokens=1100, messages=sum_of, thinking=thinking)
    assert [one.type for one in thought.content] == ["thinking", "text"]
    assert "42" in thought.content[1].text
    assert ask(client, sum_of, max_tokens=2).stop_reason == "max_tokens"
    stopped = ask(client, sum_of, stop_sequences=["plus"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "plus")
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(model=MODEL, max_tokens=0, messages=sum_of)
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="other", max_tokens=8, messages=sum_of)
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").messages.create(model=MODEL, max_tokens=8, messages=sum_of)


if __name__ == "__main__":
    main()
