"""Chats, prompts, tools, forms and models with ollama-python: `python ollama_python.py BASE_URL API_KEY`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

import ollama
from local_tools import QUESTION as TOOL_QUESTION
from local_tools import RESULT, calculator, lookup, run_tool
from pydantic import BaseModel

BASE_URL, API_KEY = sys.argv[1:]
HEADERS = {"Authorization": f"Bearer {API_KEY}"}
QUESTION = "What is 12 plus 30?"
MESSAGES = [{"role": "user", "content": QUESTION}]


class Answer(BaseModel):
    """Short enough to be whole whatever the model writes."""

    is_sum: bool


def main() -> None:
    """Raises AssertionError when an answer is not as it should be."""
    client = ollama.Client(BASE_URL, headers=HEADERS, timeout=60)
    check_models(client)
    options = ollama.Options(temperature=0, num_predict=50, seed=1, num_ctx=2048)
    whole = client.chat("pocket", MESSAGES, options=options, keep_alive="5m")
    assert "42" in (whole.message.content or ""), whole
    assert whole.done
    assert whole.done_reason == "stop"
    assert whole.prompt_eval_count
    assert whole.eval_count
    assert whole.eval_duration
    parts = list(client.chat("pocket", MESSAGES, options=options, stream=True))
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    told = client.generate("pocket", QUESTION, options=options)
    assert told.response == whole.message.content
    pieces = client.generate("pocket", "Once", raw=True, stream=True, options={"num_predict": 5})
    assert sum(piece.eval_count or 0 for piece in pieces) == 5
    formed = client.chat("pocket", MESSAGES, format=Answer.model_json_schema(), options=options)
    Answer.model_validate_json(formed.message.content or "")
    assert client.generate("pocket").done_reason == "load"
    check_tools(client)
    check_errors(client)
    assert "42" in (asyncio.run(chat_beside()) or "")


def check_models(client: ollama.Client) -> None:
    """What is served is listed, shown, running and can be pulled."""
    assert [model.model for model in client.list().models] == ["pocket:latest"]
    assert [model.name for model in client.ps().models] == ["pocket:latest"]
    shown = client.show("pocket:latest")
    assert {"completion", "tools"} <= set(shown.capabilities or ())
    assert shown.modelinfo
    assert shown.modelinfo["llama.context_length"] == 2048
    assert client.pull("pocket").status == "success"
    assert [step.status for step in client.pull("pocket", stream=True)] == ["success"]


def check_tools(client: ollama.Client) -> None:
    """A call, its result and the answer, whole and streamed, with functions as tools."""
    messages: list[ollama.Message] = [ollama.Message(role="user", content=TOOL_QUESTION)]
    options = {"temperature": 0}
    called = client.chat("pocket", messages, tools=[calculator, lookup], options=options).message
    streamed = client.chat("pocket", messages, tools=[calculator, lookup], options=options, stream=True)
    calls = [call for part in streamed for call in part.message.tool_calls or ()]
    assert calls == called.tool_calls
    [call] = calls
    result = run_tool(call.function.name, dict(call.function.arguments))
    messages += [called, ollama.Message(role="tool", content=result, tool_name=call.function.name)]
    answer = client.chat("pocket", messages, tools=[calculator, lookup], options=options)
    assert RESULT in (answer.message.content or ""), answer


def check_errors(client: ollama.Client) -> None:
    """What cannot be done has the status that Ollama's clients know, and says why."""
    image = {"role": "user", "content": "Hi", "images": [b"x"]}
    assert find_status(lambda: client.chat("llama3", MESSAGES)) == 404
    assert find_status(lambda: client.chat("pocket", [image])) == 400
    assert find_status(lambda: client.copy("pocket", "other")) == 403


def find_status(ask: Callable[[], object]) -> int:
    """Of the error that is raised; 200 without one."""
    try:
        ask()
    except ollama.ResponseError as error:
        return error.status_code if error.error else 0
    return 200


async def chat_beside() -> str | None:
    """A stream of the asynchronous client, among others."""
    client = ollama.AsyncClient(BASE_URL, headers=HEADERS)
    whole, *_ = await asyncio.gather(*(client.chat("pocket", MESSAGES) for _ in range(4)))
    return whole.message.content


if __name__ == "__main__":
    main()
