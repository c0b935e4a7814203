"""Chats, streams, tools and forms with LlamaIndex's OpenAILike: `python llama_index_chat.py URL KEY`."""

from __future__ import annotations

import asyncio
import sys
from typing import Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

ASKED = [ChatMessage(role="user", content="What is 12 plus 30?")]


class Answer(BaseModel):
    """Short enough to be whole whatever the model writes."""

    kind: Literal["sum", "difference"]
    value: int = Field(ge=0, le=999)


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def check_async(llm: OpenAILike, text: str) -> None:
    assert (await llm.achat(ASKED)).message.content == text
    pieces = [piece.delta or "" async for piece in await llm.astream_chat(ASKED)]
    assert "".join(pieces) == text


def main() -> None:
    """Raises AssertionError when an answer is not as it should be."""
    base_url, api_key = sys.argv[1:]
    llm = OpenAILike(
        model="pocket",
        api_base=base_url,
        api_key=api_key,
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=2048,
        max_tokens=64,
        temperature=0.0,
        max_retries=0,
    )
    text = llm.chat(ASKED).message.content
    assert text
    assert "42" in text
    assert "".join(piece.delta or "" for piece in llm.stream_chat(ASKED)) == text
    asyncio.run(check_async(llm, text))
    said = llm.chat_with_tools(
        [FunctionTool.from_defaults(add)], user_msg="What is 12 plus 30?", tool_required=True
    )
    (call,) = llm.get_tool_calls_from_response(said)
    assert call.tool_name == "add"
    assert set(call.tool_kwargs) <= {"a", "b"}
    form = llm.structured_predict(Answer, PromptTemplate("What is 12 plus 30?"))
    assert isinstance(form, Answer)
    plain = OpenAILike(model="pocket", api_base=base_url, api_key=api_key, max_tokens=8, max_retries=0)
    assert plain.complete("Once upon a time").text
    assert "".join(piece.delta or "" for piece in plain.stream_complete("Once upon a time"))


if __name__ == "__main__":
    main()
