"""Bodies that clients' sources make, by client: each is answered, or refused at the field that cannot be had.

Whole bodies of chat programs are in tests/e2e/clients/test_request_forms.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from served import Ask

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "What is 12 plus 30?"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
FUNCTION = {"name": "calc", "description": "Calculates.", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "calc", "arguments": '{"a": 1}'}}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "42"}
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"messages": ASKED, "max_tokens": 8},
    TEXT: {"prompt": "x", "max_tokens": 4},
    RESPONSES: {"input": "x", "max_output_tokens": 8},
    MESSAGES: {"model": "pocket", "messages": ASKED, "max_tokens": 8},
}


def part(**fields: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"text": "x"} | fields]}]


def answered(**fields: Any) -> list[dict[str, Any]]:
    """A conversation with an answer that a client has added to."""
    return [*ASKED, {"role": "assistant", "content": "42"} | fields, *ASKED]


def called(**fields: Any) -> list[dict[str, Any]]:
    """A conversation with a call that a client has added to."""
    return [*ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL | fields]}, RESULT]


EPHEMERAL = {"type": "ephemeral"}
TAKEN: list[tuple[str, str, dict[str, Any]]] = [
    *[("openai-python", CHAT, {"verbosity": word}) for word in ("low", "medium", "high")],
    ("openai-python", CHAT, {"prompt_cache_options": {"mode": "implicit", "ttl": "30m"}}),
    ("openai-python", CHAT, {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "store": True}),
    ("openai-python", CHAT, {"prediction": {"type": "content", "content": "x"}}),
    ("openai-python", CHAT, {"messages": part(type="text", prompt_cache_breakpoint={"mode": "explicit"})}),
    ("openai-python", RESPONSES, {"text": {"verbosity": "low", "format": {"type": "text"}}}),
    ("openai-python", RESPONSES, {"prompt_cache_options": {"mode": "implicit"}, "context_management": []}),
    ("openai-python", RESPONSES, {"reasoning": {"effort": "none", "context": "auto", "mode": "standard"}}),
    ("openai-python", RESPONSES, {"tools": [{"type": "function", "defer_loading": False} | FUNCTION]}),
    ("openai-python", RESPONSES, {"tools": [{"type": "function", "allowed_callers": ["direct"]} | FUNCTION]}),
    ("openai-python", RESPONSES, {"tools": [{"type": "function", "output_schema": SCHEMA} | FUNCTION]}),
    (
        "openai-python",
        RESPONSES,
        {
            "input": [
                ASKED[0],
                {
                    **{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                    "caller": {"type": "direct"},
                },
                {
                    **{"type": "function_call_output", "call_id": "c", "output": "x"},
                    "caller": {"type": "direct"},
                },
            ]
        },
    ),
    ("mistral", CHAT, {"tools": TOOLS, "tool_choice": "any", "max_tokens": 60}),
    ("mistral", CHAT, {"safe_prompt": False, "random_seed": 5, "guardrails": None}),
    *[
        ("langchain-anthropic", CHAT, {"tools": TOOLS, "tool_choice": {"type": word}, "max_tokens": 60})
        for word in ("any", "auto", "none")
    ],
    ("litellm", CHAT, {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "calc"}, "max_tokens": 60}),
    ("litellm", CHAT, {"metadata": {"tags": ["a"], "trace": {"id": 1}}, "litellm_metadata": {"a": "b"}}),
    ("litellm", CHAT, {"litellm_session_id": "s", "litellm_trace_id": "t", "litellm_call_id": "i"}),
    ("litellm", CHAT, {"num_retries": 2, "cache": {"no-cache": True}, "ttl": 5, "no-log": True}),
    ("litellm", CHAT, {"drop_params": True, "allowed_openai_params": ["x"], "custom_llm_provider": "openai"}),
    ("litellm", CHAT, {"fallbacks": ["other"], "guardrails": [], "api_version": "x"}),
    ("litellm", CHAT, {"messages": answered(thinking_blocks=[{"type": "thinking", "thinking": "hm"}])}),
    ("litellm", CHAT, {"messages": answered(provider_specific_fields=None, function_call=None)}),
    ("litellm", TEXT, {"echo": False, "suffix": None, "best_of": 1, "logit_bias": {}, "logprobs": None}),
    ("vllm", CHAT, {"tools": [{"function": FUNCTION}]}),
    *[("text", CHAT, {"response_format": word, "max_tokens": 40}) for word in ("text", "json_object")],
    ("llama.cpp", CHAT, {"response_format": {"type": "json_object", "schema": SCHEMA}, "max_tokens": 40}),
    ("deepseek", CHAT, {"thinking": {"type": "enabled"}, "response_format": {"type": "text"}}),
    ("glm", CHAT, {"thinking": {"type": "enabled", "clear_thinking": False}}),
    ("cline", CHAT, {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1100}),
    ("openrouter", CHAT, {"reasoning": {"enabled": True, "exclude": True}, "usage": {"include": True}}),
    ("openrouter", CHAT, {"reasoning": {"max_tokens": 100}, "route": "fallback", "plugins": []}),
    ("openrouter", CHAT, {"messages": answered(reasoning_details=[{"type": "reasoning.text", "text": "a"}])}),
    ("openrouter", CHAT, {"stream": True, "usage": {"include": True}, "provider": {"order": ["a"]}}),
    ("librechat", CHAT, {"reasoning": {"effort": "low", "summary": "auto"}, "verbosity": "low"}),
    ("open-webui", CHAT, {"features": {}, "tool_ids": [], "files": [], "session_id": "s", "chat_id": "c"}),
    ("ai-sdk", CHAT, {"providerOptions": {"gateway": {"order": ["a"]}}, "reasoning_effort": "low"}),
    ("anthropic", CHAT, {"cache_control": EPHEMERAL, "messages": part(type="text", cache_control=EPHEMERAL)}),
    ("lm-studio", CHAT, {"max_tokens": -1, "ttl": 300, "draft_model": ""}),
    ("lm-studio", TEXT, {"prompt": "Once upon a time", "max_tokens": -1, "stop": ["."]}),
    (
        "groq",
        CHAT,
        {"reasoning_format": "parsed", "service_tier": "on_demand", "citation_options": "disabled"},
    ),
    ("dashscope", CHAT, {"thinking_budget": 100, "enable_search": False, "result_format": "message"}),
    ("xai", CHAT, {"search_parameters": {"mode": "off"}, "deferred": False}),
    ("together", CHAT, {"safety_model": "", "repetition_penalty": 1}),
    ("fireworks", CHAT, {"raw_output": False, "perf_metrics_in_response": False}),
    ("dify", CHAT, {"stream": True, "user": "abc-123", "stop": ["Human:"], "enable_thinking": False}),
    *[
        (
            "dify",
            CHAT,
            {
                "chat_template_kwargs": {"enable_thinking": thinks, "thinking": thinks},
                **{"thinking": {"type": "enabled" if thinks else "disabled"}, "enable_thinking": thinks},
                **({"reasoning_effort": "low"} if thinks else {}),
                **{"stream": True, "stream_options": {"include_usage": True}, "web_search": False},
            },
        )
        for thinks in (False, True)
    ],
    ("n8n", CHAT, {"temperature": 0.7, "top_p": 1, "frequency_penalty": 0, "presence_penalty": 0, "n": 1}),
    ("crewai", CHAT, {"stop": ["\nObservation:"], "temperature": None, "tools": None}),
    ("autogen", CHAT, {"stream": False, "stream_options": None, "tools": []}),
    ("autogen", CHAT, {"messages": [ASKED[0] | {"name": "user"}, *answered(name="assistant")[1:]]}),
    ("ai-sdk", CHAT, {"messages": called(extra_content={"google": {"thought_signature": "x"}})}),
    (
        "continue",
        CHAT,
        {"messages": answered(content=" "), "prediction": {"type": "content", "content": "x"}},
    ),
    ("haystack", CHAT, {"stream": False, "n": 1, "tools": None, "tool_choice": None}),
    ("llama-index", CHAT, {"messages": [*called()[:2], RESULT | {"name": "calc"}], "tools": TOOLS}),
    ("semantic-kernel", CHAT, {"stream": False, "tool_choice": "auto", "parallel_tool_calls": True}),
    ("pydantic-ai", CHAT, {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}),
    ("instructor", CHAT, {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "calc"}}}),
    ("langchain-openai", CHAT, {"messages": called(index=0), "tools": TOOLS, "n": 1}),
    ("zed", CHAT, {"messages": part(type="text"), "stop": [], "prompt_cache_key": "t", "tools": TOOLS}),
    ("any of JavaScript", CHAT, {"max_tokens": 8.0, "seed": 1.0, "top_k": 40.0}),
    ("anthropic", MESSAGES, {"service_tier": "auto", "thinking": {"type": "adaptive"}, "container": None}),
    ("anthropic", MESSAGES, {"metadata": {"user_id": "x"}, "stop_sequences": []}),
]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"verbosity": "brief"}, "verbosity"),
    (RESPONSES, {"text": {"verbosity": "brief"}}, "text.verbosity"),
    (RESPONSES, {"context_management": [{"type": "compaction"}]}, "context_management"),
    (RESPONSES, {"reasoning": {"context": "all_turns"}}, "reasoning.context"),
    (
        RESPONSES,
        {"tools": [{"type": "function", "defer_loading": True} | FUNCTION]},
        "tools[0].defer_loading",
    ),
    (RESPONSES, {"metadata": {"a": 1}}, "metadata[...]"),
    (CHAT, {"moderation": {"model": "omni-moderation-latest"}}, "moderation"),
    (CHAT, {"tools": TOOLS, "tool_choice": "calc"}, "tool_choice"),
    (CHAT, {"tool_choice": "any"}, "tool_choice"),
    (CHAT, {"tools": [{"type": "function"} | FUNCTION]}, "tools[0].name"),
    (RESPONSES, {"tools": TOOLS}, "tools[0].function"),
    (CHAT, {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
    (CHAT, {"response_format": "json_schema"}, "response_format"),
    (CHAT, {"web_search_options": {}}, "web_search_options"),
    (CHAT, {"search_parameters": {"mode": "auto"}}, "search_parameters"),
    (CHAT, {"thinking": {"type": "enabled", "budget_tokens": "many"}}, "thinking_token_budget"),
    (CHAT, {"guardrails": ["pii"]}, "guardrails"),
    (CHAT, {"models": ["a", "b"]}, "models"),
    (CHAT, {"max_tokens": -2}, "max_tokens"),
    (CHAT, {"max_tokens": 8.5}, "max_tokens"),
    (CHAT, {"temperature": "0.7"}, "temperature"),
    (CHAT, {"messages": answered(prefix=True)}, "messages[1].prefix"),
    (CHAT, {"messages": answered(reasoning_details=[{"type": "audio"}])}, "messages[1].reasoning_details"),
]


@pytest.mark.parametrize(
    ("client", "path", "fields"), TAKEN, ids=[f"{form[0]} {', '.join(form[2])}" for form in TAKEN]
)
def test_what_a_client_sends_is_answered(ask: Ask, client: str, path: str, fields: dict[str, Any]) -> None:
    answer = ask(path, LEAST[path] | fields)
    assert answer.status == 200, (client, answer.json)


@pytest.mark.parametrize(("path", "fields", "param"), REFUSED, ids=[form[2] for form in REFUSED])
def test_what_cannot_be_had_is_refused_at_its_field(
    ask: Ask, path: str, fields: dict[str, Any], param: str
) -> None:
    answer = ask(path, LEAST[path] | fields)
    assert (answer.status, answer.json["error"]["param"]) == (400, param)
