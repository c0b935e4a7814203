"""A chat and a streamed chat with langchain-openai: `python langchain_chat.py BASE_URL API_KEY`."""

from __future__ import annotations

import sys
from typing import Any, Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from local_tools import QUESTION as TOOL_QUESTION
from local_tools import RESULT, calculator, lookup, run_tool
from pydantic import BaseModel, Field

QUESTION = "What is 12 plus 30?"


class Answer(BaseModel):
    """Short enough to be whole whatever the model writes."""

    kind: Literal["sum", "difference"]
    value: int = Field(ge=0, le=999)


def main() -> None:
    """Raises AssertionError when an answer is not as it should be."""
    base_url, api_key = sys.argv[1:]
    model = ChatOpenAI(
        model="pocket", base_url=base_url, api_key=api_key, temperature=0, max_retries=0, timeout=60
    )
    answer = model.invoke(QUESTION)
    assert "42" in answer.content, answer
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.usage_metadata["output_tokens"] > 0
    chunks = list(model.stream([("system", "You are a helpful assistant."), ("human", QUESTION)]))
    assert len(chunks) > 2
    assert "".join(chunk.content for chunk in chunks).strip()
    again = list(model.stream(QUESTION))
    assert "".join(chunk.content for chunk in again) == answer.content
    batched = model.batch([QUESTION] * 4)
    assert [one.content for one in batched] == [answer.content] * 4
    parsing = model.with_structured_output(Answer)
    assert isinstance(parsing.invoke(QUESTION), Answer)
    assert isinstance(list(parsing.stream(QUESTION))[-1], Answer)
    assert isinstance(
        model.with_structured_output(Answer, method="function_calling").invoke(QUESTION), Answer
    )
    run_tools(model.bind_tools([tool(calculator), tool(lookup)]))


def run_tools(model: Any) -> None:
    """A call, its result and the answer, whole and streamed."""
    messages: list[Any] = [HumanMessage(TOOL_QUESTION)]
    called = model.invoke(messages)
    chunks = list(model.stream(messages))
    whole = sum(chunks[1:], chunks[0])
    assert [one["args"] for one in whole.tool_calls] == [one["args"] for one in called.tool_calls]
    [call] = called.tool_calls
    result = run_tool(call["name"], call["args"])
    messages += [called, ToolMessage(result, tool_call_id=call["id"])]
    assert RESULT in model.invoke(messages).content


if __name__ == "__main__":
    main()
