"""Chats, forms and tools with langchain-ollama: `python langchain_ollama_chat.py BASE_URL API_KEY`."""

from __future__ import annotations

import sys

from langchain_chat import QUESTION, Answer, run_tools
from langchain_core.tools import tool
from langchain_ollama import ChatOllama, OllamaLLM
from local_tools import calculator, lookup


def main() -> None:
    """Raises AssertionError when an answer is not as it should be."""
    base_url, api_key = sys.argv[1:]
    headers = {"client_kwargs": {"headers": {"Authorization": f"Bearer {api_key}"}}}
    model = ChatOllama(
        model="pocket", base_url=base_url, temperature=0, validate_model_on_init=True, num_ctx=2048, **headers
    )
    answer = model.invoke(QUESTION)
    assert "42" in answer.content, answer
    assert answer.response_metadata["done_reason"] == "stop"
    assert answer.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.content for chunk in model.stream(QUESTION)) == answer.content
    assert [one.content for one in model.batch([QUESTION] * 4)] == [answer.content] * 4
    # Without tool_choice, which Ollama's API does not have, a tool's schema is not enforced.
    assert isinstance(model.with_structured_output(Answer, method="json_schema").invoke(QUESTION), Answer)
    run_tools(model.bind_tools([tool(calculator), tool(lookup)]))
    completing = OllamaLLM(model="pocket", base_url=base_url, temperature=0, **headers)
    assert "42" in completing.invoke(QUESTION)


if __name__ == "__main__":
    main()
