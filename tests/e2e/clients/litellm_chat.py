"""Answers and streams with litellm, by its two ways to such a server: `python litellm_chat.py URL KEY`."""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

import litellm
from local_tools import DESCRIPTIONS, QUESTION, RESULT, SCHEMAS, run_tool
from pydantic import BaseModel, Field

MESSAGES = [{"role": "user", "content": "What is 12 plus 30?"}]


class Answer(BaseModel):
    """Short enough to be whole whatever the model writes."""

    kind: Literal["sum", "difference"]
    value: int = Field(ge=0, le=999)


def main() -> None:
    """Raises AssertionError when an answer is not as it should be."""
    base_url, api_key = sys.argv[1:]
    for provider in ("openai", "hosted_vllm"):
        fields: dict[str, Any] = {
            "model": f"{provider}/pocket",
            "messages": MESSAGES,
            "api_base": base_url,
            "api_key": api_key,
            "temperature": 0,
            "timeout": 60,
            "num_retries": 0,
        }
        whole = litellm.completion(**fields)
        text = whole.choices[0].message.content
        assert "42" in text, whole
        assert whole.usage.completion_tokens > 0
        chunks = list(litellm.completion(**fields, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
        assert chunks[-1].choices[0].finish_reason == "stop"
        parsed = litellm.completion(**fields, response_format=Answer)
        Answer.model_validate_json(parsed.choices[0].message.content)
        chunks = litellm.completion(**fields, response_format=Answer, stream=True)
        Answer.model_validate_json("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
        run_tools(fields)
    completed = litellm.text_completion(
        model="text-completion-openai/pocket",
        prompt="Once upon a time",
        api_base=base_url,
        api_key=api_key,
        max_tokens=8,
    )
    assert completed.choices[0].text


def run_tools(fields: dict[str, Any]) -> None:
    """A call, its result and the answer."""
    tools = [
        {
            "type": "function",
            "function": {"name": name, "description": DESCRIPTIONS[name], "parameters": schema},
        }
        for name, schema in SCHEMAS.items()
    ]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    fields = fields | {"tools": tools, "messages": messages}
    called = litellm.completion(**fields).choices[0]
    assert called.finish_reason == "tool_calls"
    [call] = called.message.tool_calls
    rebuilt = litellm.stream_chunk_builder(list(litellm.completion(**fields, stream=True)))
    assert rebuilt.choices[0].message.tool_calls[0].function.arguments == call.function.arguments
    result = run_tool(call.function.name, json.loads(call.function.arguments))
    messages += [called.message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    assert RESULT in litellm.completion(**fields).choices[0].message.content


if __name__ == "__main__":
    main()
