"""Models' slips through the APIs: the same calls, in a whole answer and in its stream."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from dialect_transcripts import Transcript
from openai_fakes import make_app
from tool_template import TEMPLATE
from transcript_judges import judge

Json = dict[str, Any]
SLIPS: list[Json] = json.loads((Path(__file__).parents[2] / "golden" / "output_slips.json").read_bytes())
# Of formats whose markers may be text, which is all that a scripted model writes.
CASES = (
    "qwen3_coder, no opening marker after prose",
    "hermes, a block of Markdown",
    "glm47, no opening tag of a name",
    "llama4_pythonic, a list of JSON behind prose",
    "deepseek_v32, one parameter that holds all",
    "phi4_mini_json, a list in an argument and prose",
    "minimax_m2, no section",
)
STRING, ANY = {"type": "string"}, {"type": "object"}
WEATHER = ANY | {"properties": {"city": STRING, "days": {"type": "integer"}, "tags": {"type": "array"}}}
TOOLS = {"get_weather": WEATHER, "list_files": ANY | {"properties": {}}}


def make_body(path: str) -> Json:
    body: Json = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}
    functions = [{"name": name, "parameters": schema} for name, schema in TOOLS.items()]
    match path:
        case "/v1/messages":
            tools = [{"name": name, "input_schema": schema} for name, schema in TOOLS.items()]
            return body | {"max_tokens": 90, "tools": tools}
        case "/v1/responses":
            return {
                "model": "fake",
                "input": "Hi",
                "tools": [{"type": "function"} | one for one in functions],
            }
        case _:
            return body | {"tools": [{"type": "function", "function": one} for one in functions]}


def list_calls(path: str, answer: Json) -> list[list[Any]]:
    match path:
        case "/v1/messages":
            blocks = [block for block in answer["content"] if block["type"] == "tool_use"]
            return [[block["name"], block["input"]] for block in blocks]
        case "/v1/responses":
            items = [item for item in answer["output"] if item["type"] == "function_call"]
            return [[item["name"], json.loads(item["arguments"])] for item in items]
        case "/api/chat":
            functions = [call["function"] for call in answer["message"]["tool_calls"]]
            return [[function["name"], function["arguments"]] for function in functions]
        case _:
            functions = [call["function"] for call in answer["choices"][0]["message"]["tool_calls"]]
            return [[function["name"], json.loads(function["arguments"])] for function in functions]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"])
@pytest.mark.parametrize("name", CASES)
async def test_a_slip_is_the_same_in_an_answer_and_its_stream(name: str, path: str) -> None:
    slip = next(slip for slip in SLIPS if slip["case"] == name)
    text = slip["text"].removesuffix("<|end_of_turn|>")
    app = make_app(None, TEMPLATE, tool_call_parser=slip["format"], max_model_len=2048)
    pieces = [text[place : place + 3] for place in range(0, len(text), 3)]
    turn = await Transcript(app).run_turn({"ask": path, "body": make_body(path), "says": pieces})
    assert turn.get("status", 200) == 200, turn
    judge(turn)  # its stream adds up to it
    calls = [[called, json.loads(arguments)] for called, arguments in slip["calls"]]
    assert list_calls(path, turn["answer"]) == calls
    assert slip["content"] in json.dumps(turn["answer"])
    app.check_ended()
