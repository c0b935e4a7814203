"""Tools and thoughts of the whole engine: random weights behind a template that knows both."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grammar_judge import find_faults
from quire import LLM, SamplingParams
from served import Served
from tool_model import make_tool_model

USER = {"role": "user", "content": "How warm is it in Rome?"}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Oslo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "scale": {"type": ["string", "null"], "maxLength": 2},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA} | fields}


TOOLS = [tool("weather"), tool("forecast", description="Days to come.")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tool_model(tmp_path_factory.mktemp("tools") / "random")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    sizes: dict[str, Any] = {"max_model_len": 1024, "num_gpu_blocks_override": 900, "block_size": 8}
    with LLM(str(folder), dtype="float32", distributed_executor_backend="uni", **sizes) as llm:
        yield llm


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"weather", "forecast"}),
        ({"type": "function", "function": {"name": "forecast"}}, {"forecast"}),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "weather"}}],
                },
            },
            {"weather"},
        ),
    ],
    ids=["required", "named", "allowed"],
)
def test_calls_that_are_asked_for_name_an_offered_tool_and_fit_its_schema(
    llm: LLM, choice: Any, names: set[str]
) -> None:
    params = [SamplingParams(max_tokens=120, seed=seed) for seed in range(36)]
    outputs = llm.chat(
        [[USER]] * 36,
        params,
        use_tqdm=False,
        tools=TOOLS,
        tool_choice=choice,
        parallel_tool_calls=False,
        chat_template_kwargs={"enable_thinking": False},
    )
    num_ended = 0
    for output in outputs:
        (one,) = output.outputs
        if one.finish_reason != "stop":
            continue
        num_ended += 1
        assert one.message is not None
        (call,) = one.message.tool_calls
        assert call.name in names
        assert find_faults(SCHEMA, json.loads(call.arguments)) == []
        assert one.message.content == ""
    assert num_ended > 1  # others think, or put white space, for ever


def test_over_http_a_stream_equals_the_whole_answer_and_its_call_can_be_answered(folder: Path) -> None:
    served = Served(str(folder), "--dtype", "float32", "--max-model-len", "1024")
    try:
        client = served.client()
        asked: dict[str, Any] = {
            "model": client.models.list().data[0].id,
            "messages": [USER],
            "tools": TOOLS,
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "seed": 5,
            "max_tokens": 200,
            "extra_body": {"thinking_token_budget": 4},
        }
        (choice,) = client.chat.completions.create(**asked).choices
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls or []
        assert call.type == "function"
        arguments = ""
        with client.chat.completions.create(**asked, stream=True) as stream:
            for chunk in stream:
                for part in chunk.choices[0].delta.tool_calls or []:
                    assert part.function is not None
                    arguments += part.function.arguments or ""
        assert arguments == call.function.arguments
        answered = [USER, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "20"}]
        plain = asked | {"messages": answered, "tool_choice": "none", "max_tokens": 4}
        assert client.chat.completions.create(**plain).choices[0].finish_reason in ("stop", "length")
    finally:
        assert served.stop() == 0
