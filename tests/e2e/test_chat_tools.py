"""Tools and thoughts of the whole engine: random weights behind a template that knows both."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grammar_judge import find_faults
from quire import LLM, SamplingParams
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
