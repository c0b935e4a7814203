"""Requests as Open WebUI, Continue and `ollama` send them, over Ollama's API and over OpenAI's.

By the sources of both: backend/open_webui/utils/payload.py, and core/llm/llms/Ollama.ts.
"""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest
from served import Served

Json = dict[str, Any]
QUESTION = "What is 12 plus 30?"
USER: list[Json] = [{"role": "user", "content": QUESTION}]
TOOL: Json = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Calculates an expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}
CALLED: Json = {"name": "calculator", "arguments": {"expression": "12 + 30"}}
CALLED_AS_TEXT: Json = CALLED | {"arguments": json.dumps(CALLED["arguments"])}

# Open WebUI names models with a tag, writes options that its users set, and asks for titles without a stream.
OPEN_WEBUI: list[tuple[str, Json]] = [
    (
        "/api/chat",
        {
            "model": "pocket:latest",
            "messages": [{"role": "system", "content": "Be brief."}, *USER],
            "stream": True,
            "think": False,
            "keep_alive": "5m",
            "options": {
                **{
                    "temperature": 0.0,
                    "top_p": 0.9,
                    "top_k": 40,
                    "min_p": 0.0,
                    "seed": 1,
                    "num_predict": 128,
                },
                **{"mirostat": 0, "mirostat_eta": 0.1, "mirostat_tau": 5.0, "repeat_last_n": 64, "tfs_z": 1},
                **{"num_ctx": 2048, "num_batch": 512, "num_keep": 24, "num_thread": 2, "num_gpu": 0},
                **{"use_mmap": True, "use_mlock": False, "stop": ["<never>"]},
            },
        },
    ),
    (
        "/api/chat",
        {
            "model": "pocket:latest",
            "messages": [
                *USER,
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"index": 0, "id": "call_1", "function": CALLED}],
                },
                {"role": "tool", "content": "42", "tool_call_id": "call_1"},
            ],
            "tools": [TOOL],
            "stream": False,
        },
    ),
    (
        "/v1/chat/completions",
        {
            "model": "pocket",
            "messages": [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}],
            "stream": True,
            "stream_options": {"include_usage": True},
            **{"temperature": 0.0, "top_p": 0.9, "max_tokens": 128, "frequency_penalty": 0.0, "seed": 1},
        },
    ),
    (
        "/v1/chat/completions",
        {"model": "pocket", "messages": USER, "stream": False, "max_completion_tokens": 99},
    ),
]
# Continue says how large it takes the context to be, and completes by raw prompts.
CONTINUE: list[tuple[str, Json]] = [
    (
        "/api/chat",
        {
            "model": "pocket",
            "messages": [
                {"role": "user", "content": QUESTION},
                {"role": "assistant", "content": "", "tool_calls": [{"function": CALLED}]},
                {"role": "tool", "content": "42"},
            ],
            "options": {"temperature": 0, "num_predict": 64, "num_ctx": 8192, "stop": ["<never>"]},
            "keep_alive": 1800,
            "stream": True,
            "tools": [TOOL],
        },
    ),
    (
        "/api/generate",
        {
            "model": "pocket",
            "prompt": "The capital of",
            "raw": True,
            "options": {"temperature": 0.01, "num_predict": 8, "num_ctx": 8192, "stop": ["\\n\\n", "/src/"]},
            "keep_alive": 1800,
            "stream": True,
        },
    ),
    (
        "/v1/chat/completions",
        {
            "model": "pocket",
            "messages": [
                *USER,
                {
                    "role": "assistant",
                    "content": " ",
                    "tool_calls": [{"id": "call_1", "type": "function", "function": CALLED_AS_TEXT}],
                },
                {"role": "tool", "content": "42", "tool_call_id": "call_1"},
            ],
            "tools": [TOOL],
            "stream": True,
            "stream_options": {"include_usage": True},
            **{"temperature": 0, "max_tokens": 64, "frequency_penalty": 0, "presence_penalty": 0},
        },
    ),
    (
        "/v1/completions",
        {"model": "pocket", "prompt": "The capital of", "max_tokens": 8, "temperature": 0.01, "stream": True},
    ),
]

# SillyTavern's text completions for vLLM by its source (constants.js, VLLM_KEYS). From memory, no dumps:
# lm-eval's chats, whose messages have a type, Zed's and OpenHands' tools, whose contents are parts.
PARTS: list[Json] = [{"type": "text", "text": QUESTION, "cache_control": {"type": "ephemeral"}}]
OTHERS: list[tuple[str, Json]] = [
    (
        "/v1/completions",
        {
            **{"model": "pocket", "prompt": "The capital of", "max_tokens": 8, "n": 1, "stream": True},
            **{"temperature": 0.0, "top_p": 1, "top_k": 0, "min_p": 0, "min_tokens": 0, "seed": 1},
            **{"repetition_penalty": 1, "frequency_penalty": 0, "presence_penalty": 0, "length_penalty": 1},
            **{"early_stopping": False, "ignore_eos": False, "include_stop_str_in_output": False},
            **{"skip_special_tokens": True, "spaces_between_special_tokens": True, "stop": ["<never>"]},
        },
    ),
    (
        "/v1/chat/completions",
        {
            "model": "pocket",
            "messages": [{"role": "user", "content": QUESTION, "type": "text"}],
            **{"max_tokens": 8, "temperature": 0, "stop": ["<never>"], "seed": 1234},
        },
    ),
    (
        "/v1/chat/completions",
        {
            "model": "pocket",
            "messages": [
                {"role": "user", "content": PARTS},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "call_1", "type": "function", "function": CALLED_AS_TEXT}],
                },
                {
                    "role": "tool",
                    "name": "calculator",
                    "tool_call_id": "call_1",
                    "content": [{"type": "text", "text": "42"}],
                },
            ],
            "stream": True,
            "stop": [],
            "tools": [TOOL],
            **{"temperature": 0.0, "max_completion_tokens": 8, "tool_choice": "auto"},
            **{"parallel_tool_calls": False, "prompt_cache_key": "a thread"},
        },
    ),
]

# `ollama run` (cmd/cmd.go, api/types.go) writes every field that has no omitempty.
UNSET: Json = {"suffix": "", "system": "", "template": "", "options": None}
OLLAMA: list[tuple[str, Json]] = [
    ("/api/chat", {"model": "pocket", "messages": USER, "options": {}, "stream": True}),
    ("/api/generate", {"model": "pocket", "prompt": QUESTION, **UNSET, "stream": True}),
]


@pytest.mark.parametrize(
    ("path", "body"),
    FORMS := [*OPEN_WEBUI, *CONTINUE, *OTHERS, *OLLAMA],
    ids=[f"{form[0]} {n}" for n, form in enumerate(FORMS)],
)
def test_a_chat_program_is_answered(shared_server: Served, path: str, body: Json) -> None:
    answer = shared_server.ask(path, body)
    assert answer.status == 200, answer.json
    if isinstance(answer.json, dict):
        parts = [answer.json]
    else:
        lines = [line.removeprefix("data: ") for line in answer.json.splitlines() if line]
        assert body["stream"]
        assert path.startswith("/api/") or lines.pop() == "[DONE]"
        parts = list(map(json.loads, lines))
    assert not path.startswith("/api/") or parts[-1]["done"]
    assert "".join(map(read_text, parts)).strip()


def read_text(part: Json) -> str:
    """The text of an answer or a part of it, in whichever form."""
    choice = next(iter(part.get("choices", ())), part)
    message = choice.get("message") or choice.get("delta") or {}
    return message.get("content") or choice.get("text") or choice.get("response") or ""


def test_what_these_programs_look_for_at_a_server_is_there(shared_server: Served) -> None:
    ask = shared_server.ask
    assert [model["model"] for model in ask("/api/tags").json["models"]] == ["pocket:latest"]
    assert tuple(map(int, ask("/api/version").json["version"].split("."))) > (0, 6, 4)  # what clients ask for
    # Continue looks for num_ctx and stop strings in lines of two words.
    shown = ask("/api/show", {"name": "pocket"}).json
    assert {"num_ctx": "2048"}.items() <= dict(map(str.split, shown["parameters"].splitlines())).items()
    assert ask("/api/ps").json["models"][0]["context_length"] == 2048
    assert (
        len(ask("/api/embed", {"model": "pocket", "input": ["a", "b"], "truncate": True}).json["embeddings"])
        == 2
    )
    told = {"model": "pocket", "system": "", "template": "", "verbose": False, "options": None, "name": ""}
    assert ask("/api/show", told).json["details"]["family"] == "llama"
    assert ask("/api/generate", {"model": "pocket", "prompt": "", **UNSET}).json["done_reason"] == "load"
    assert ask("/").json == "Ollama is running"
    request = urllib.request.Request(
        f"{shared_server.url}/", method="HEAD", headers={"authorization": f"Bearer {shared_server.api_key}"}
    )
    with urllib.request.urlopen(request, timeout=30) as head:  # as `ollama` does before each command
        assert (head.status, head.read()) == (200, b"")
