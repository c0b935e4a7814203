"""Requests' prompts and conversations -> what the engine takes. Long ones leave the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar, cast

from ..tokenizer import Tokenizer
from .errors import FieldError
from .schema import ChatMessage, TextPart
from .serving import PromptInput, Serving

_LONG_TEXT = 20_000  # characters; rendering or tokenizing more would hold up the event loop for milliseconds
_LONG_CHAT = 64  # messages, likewise
_NUM_THREADS = 2
_RESERVED_VARIABLES = {
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tokenize",
}
_SILENT_PARTS = ("image_url", "input_audio", "file")

T = TypeVar("T")


class Conversation(NamedTuple):
    """What the chat template renders."""

    messages: Sequence[ChatMessage]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: dict[str, Any] | None = None
    add_special_tokens: bool = False
    param: str = "messages"  # the request's field that holds the messages, for errors


def split_prompts(prompt: str | list[str | int | list[int]], max_prompts: int) -> list[PromptInput]:
    """The prompts of a completions request, which may be one or many, as text or token ids."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [cast(list[int], prompt)]
    if kinds not in ({str}, {list}):
        raise FieldError("prompt", prompt, "a text, a list of texts, token ids, or a list of token id lists")
    if len(prompt) > max_prompts:
        raise FieldError("prompt", f"{len(prompt)} prompts", f"at most {max_prompts} (max_prompts)")
    return cast(list[PromptInput], prompt)


async def tokenize_prompt(
    serving: Serving, prompt: PromptInput, add_special_tokens: bool | None
) -> PromptInput:
    """The prompt itself where the engine's own tokenizing does, else its token ids."""
    if not isinstance(prompt, str):
        return prompt
    is_long = len(prompt) > _LONG_TEXT
    if not prompt or (add_special_tokens is not False and not is_long):
        return prompt
    return await encode(serving.tokenizer, prompt, add_special_tokens is not False)


async def encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Token ids of a text of any length."""
    if len(text) <= _LONG_TEXT:
        return tokenizer.encode(text, add_special_tokens)
    return await _run_in_thread(lambda: tokenizer.encode(text, add_special_tokens))


async def render_chat(serving: Serving, chat: Conversation) -> list[int]:
    """Token ids of a conversation by the model's chat template, with a time limit.

    Raises FieldError or PromptError for messages that are malformed, refused by the template or too long.
    """
    limits = serving.options.limits
    if len(chat.messages) > limits.max_messages:
        allowed = f"at most {limits.max_messages} (max_messages)"
        raise FieldError(chat.param, f"{len(chat.messages)} messages", allowed)
    for name in chat.variables or ():
        if name in _RESERVED_VARIABLES:
            raise FieldError(f"chat_template_kwargs.{name}", name, "a name that the server does not set")
    messages = [_to_plain(f"{chat.param}[{i}]", message) for i, message in enumerate(chat.messages)]
    tokenizer = serving.tokenizer
    length = sum(len(str(message.get("content", ""))) for message in messages)
    if length <= _LONG_TEXT and len(messages) <= _LONG_CHAT:
        ids = _render(tokenizer, chat, messages)
    else:
        try:
            async with asyncio.timeout(limits.max_render_s):
                ids = await _run_in_thread(lambda: _render(tokenizer, chat, messages))
        except TimeoutError:
            allowed = f"what the chat template renders in {limits.max_render_s:g} s (max_render_s)"
            raise FieldError(chat.param, f"{length} characters", allowed) from None
    limit = serving.llm.facts.max_model_len
    if len(ids) >= limit:
        allowed = f"at most {limit - 1} (max_model_len={limit}, one to generate)"
        raise FieldError(chat.param, f"{len(ids)} tokens", allowed, "context_length_exceeded")
    return ids


def _render(tokenizer: Tokenizer, chat: Conversation, messages: list[dict[str, Any]]) -> list[int]:
    template = tokenizer.chat_template
    if template is None:
        raise FieldError(chat.param, "a conversation", "/v1/completions: this model has no chat template")
    try:
        text = template.render(
            messages, chat.add_generation_prompt, chat.continue_final_message, chat.variables
        )
    except RecursionError:
        raise FieldError(chat.param, "a conversation", "JSON of less depth") from None
    return tokenizer.encode(text, chat.add_special_tokens)


def _to_plain(name: str, message: ChatMessage) -> dict[str, Any]:
    """A message as the template takes it, without what clients echo back from an answer."""
    for field in ("audio", "function_call"):
        if getattr(message, field) is not None:
            raise FieldError(f"{name}.{field}", getattr(message, field), "none: only text is supported")
    content = message.content
    if isinstance(content, list):
        content = [_check_part(f"{name}.content[{i}]", part) for i, part in enumerate(content)]
    plain: dict[str, Any] = {"role": message.role, "content": content}
    for field in ("name", "tool_call_id", "tool_calls", "reasoning_content"):
        value = getattr(message, field)
        if value:
            plain[field] = value
    return plain


def _check_part(name: str, part: TextPart) -> dict[str, str]:
    if part.type not in ("text", "input_text", "output_text") or any(getattr(part, f) for f in _SILENT_PARTS):
        raise FieldError(f"{name}.type", part.type, "'text': only text is supported")
    if part.text is None:
        raise FieldError(f"{name}.text", None, "a text")
    return {"type": "text", "text": part.text}


async def _run_in_thread(work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(_threads(), work)


@lru_cache(maxsize=1)
def _threads() -> ThreadPoolExecutor:
    """Few, so that long prompts leave the processor to the event loop."""
    return ThreadPoolExecutor(_NUM_THREADS, "prompt")
