"""Refuses what a request may name and Quire does not have, except at the value that asks for nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from ..errors import FieldError


def _is_off(value: Any) -> bool:
    return value is None or value is False or value in ([], {}, "")


def _keeps_messages(value: Any) -> bool:
    """Whether a context_management leaves out thoughts only: which are shown is the template's to say."""
    return all(str(edit.get("type")).startswith("clear_thinking_") for edit in value.edits or ())


# Field -> (what is allowed, whether a value is).
_Rule = tuple[str, Callable[[Any], bool]]
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_SHARED_RULES: dict[str, _Rule] = {
    "kv_transfer_params": ("none: KV caches are not transferred", _is_off),
    "ec_transfer_params": ("none: encoder caches are not transferred", _is_off),
    "watermarking": ("false: watermarks are not supported", _is_off),
}
COMPLETION_RULES: dict[str, _Rule] = _SHARED_RULES | {
    "suffix": ("none: filling in the middle is not supported", _is_off),
    "prompt_embeds": ("none: a prompt is text or token ids", _is_off),
}
TOKENIZE_RULES: dict[str, _Rule] = {
    "chat_template": ("none: the template is the model's own", lambda _: False)
}
CHAT_RULES: dict[str, _Rule] = (
    _SHARED_RULES
    | TOKENIZE_RULES
    | {
        "return_prompt_text": ("false: /tokenize and /detokenize tell it", _is_off),
        "functions": ("none: use tools", _is_off),
        "function_call": ("'none' or 'auto': use tool_choice", lambda value: value in ("none", "auto")),
        "reasoning_effort": (", ".join(map(repr, REASONING_EFFORTS)), REASONING_EFFORTS.__contains__),
        "modalities": ("['text']: only text is supported", lambda value: value == ["text"]),
        "audio": ("none: only text is supported", _is_off),
        "prediction": ("none: predicted outputs are not supported", _is_off),
        "web_search_options": ("none: web search is not supported", lambda _: False),
        "verbosity": ("'medium': verbosity is not supported", lambda value: value == "medium"),
    }
)
LOGPROBS_ITEM = "message.output_text.logprobs"
# Thoughts are in the answer in plain text, which is taken back: there is nothing to encrypt.
_INCLUDES = (LOGPROBS_ITEM, "reasoning.encrypted_content")
RESPONSES_RULES: dict[str, _Rule] = _SHARED_RULES | {
    "enable_response_messages": ("false: /tokenize tells the tokens of a prompt", _is_off),
    "previous_input_messages": ("none: use input", _is_off),
    "conversation": ("none: conversations are not stored", _is_off),
    "prompt": ("none: prompt templates are not stored", _is_off),
    "truncation": ("'auto' or 'disabled'", lambda value: value in ("auto", "disabled")),
    "include": (f"of {', '.join(map(repr, _INCLUDES))}", lambda value: set(value) <= set(_INCLUDES)),
}
MESSAGES_RULES: dict[str, _Rule] = {
    "context_management": ("clear_thinking edits only: nothing else is left out", _keeps_messages),
    "compaction": ("none: conversations are not summarized", _is_off),
    "container": ("none: no code is run", _is_off),
    "mcp_servers": ("none: only the caller runs tools", _is_off),
    "thread": ("none: conversations are not stored", _is_off),
}
RERANK_RULES: dict[str, _Rule] = {
    "rank_fields": ("['text']: documents are texts", lambda value: value in ([], ["text"])),
    "relevant_spans": ("none: which part of a document is relevant is not told", _is_off),
}
COHERE_EMBED_RULES: dict[str, _Rule] = {
    "images": ("none: only text is supported", _is_off),
    "inputs": ("none: use texts", _is_off),
}


def check_supported(request: msgspec.Struct, rules: dict[str, _Rule]) -> None:
    """Raise FieldError (400) for the first field whose value would change the answer and cannot."""
    for name, (allowed, is_allowed) in rules.items():
        value = getattr(request, name)
        if value is not None and not is_allowed(value):
            raise FieldError(name, value, allowed, "unsupported_field")
