"""Agents of pydantic-ai over Chat Completions and Responses: `pydantic_agent.py BASE_URL API_KEY`.

Not over Messages: pydantic-ai 2.31 passes anthropic 2.12 a `temperature` and a client that it does not take.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from local_tools import QUESTION, RESULT, calculator, lookup
from pydantic_ai import Agent
from pydantic_ai.messages import ToolReturnPart
from pydantic_ai.models import Model
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


def make_models(base_url: str, api_key: str) -> Iterator[Model]:
    """The pocket model by each API."""
    provider = OpenAIProvider(base_url=base_url, api_key=api_key)
    yield OpenAIChatModel("pocket", provider=provider)
    yield OpenAIResponsesModel("pocket", provider=provider)


def main() -> None:
    """Raises AssertionError when an answer is not as it should be."""
    base_url, api_key = sys.argv[1:]
    for model in make_models(base_url, api_key):
        agent = Agent(model, tools=[calculator, lookup], model_settings={"temperature": 0, "max_tokens": 300})
        result = agent.run_sync(QUESTION)
        assert RESULT in result.output, result
        parts = [part for message in result.all_messages() for part in message.parts]
        assert [part.content for part in parts if isinstance(part, ToolReturnPart)] == [RESULT]


if __name__ == "__main__":
    main()
