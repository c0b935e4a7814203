"""Requests' prompts and conversations -> what the engine takes.

Short prompts are left to the engine's own tokenizing; whatever takes longer, and every chat template, runs in
the server's text processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import msgspec
from starlette.responses import Response

from ....ipc.errors import SamplingParamsError
from ....ipc.params.beam_search import BeamSearch
from ....ipc.params.sampling_params import SamplingParams
from ....ipc.protocol.token_ids import decode_token_ids, encode_token_ids
from ...requests.input_processor import PreparedParams, list_bad_word_texts
from ...requests.prompts import Truncation, describe_length
from ..bodies.parsing import NEEDS_PROMPT
from ..caller import Caller
from ..errors import FieldError
from ..serving import PromptInput, Serving
from ..text_process.jobs import Body, Conversation, DecodeJob, EncodeJob, GrammarJob, Text, TextJob, TokenIds
from .formats import compile_format
from .sampling import make_search_params

# Characters of texts that are tokenized in the event loop: half a millisecond of the usual tokenizers.
MAX_INLINE_LENGTH = 2000
_LARGE_IDS_BYTES = 20_000
_MAX_INLINE_IDS = 2000  # decoded in the event loop, likewise
_RESERVED_VARIABLES = {
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tokenize",
}


def split_prompts(
    prompt: str | list[str | int | list[int]],
    max_prompts: int,
    max_model_len: int,
    truncation: Truncation | None = None,
) -> list[PromptInput]:
    """The prompts of a completions request, which may be one or many, as text or token ids.

    Token ids are cut as `truncation` says.
    """
    if prompt == "":
        raise FieldError("prompt", prompt, NEEDS_PROMPT)
    if isinstance(prompt, str):
        return [prompt]
    is_long = len(prompt) >= max(max_model_len, max_prompts + 1) and isinstance(prompt[0], int)
    if is_long and truncation is None:
        allowed = describe_length(max_model_len)
        raise FieldError("prompt", f"{len(prompt)} tokens", allowed, "context_length_exceeded")
    kinds = set(map(type, prompt))
    if kinds == {int}:
        ids = cast(list[int], prompt)
        return [ids if truncation is None else truncation.apply(ids)]
    if kinds not in ({str}, {list}):
        raise FieldError("prompt", prompt, "a text, a list of texts, token ids, or a list of token id lists")
    if len(prompt) > max_prompts:
        raise FieldError("prompt", f"{len(prompt)} prompts", f"at most {max_prompts} (max_prompts)")
    prompts = cast(list[PromptInput], prompt)
    if truncation is None:
        return prompts
    return [item if isinstance(item, str) else truncation.apply(item) for item in prompts]


async def tokenize_prompts(
    serving: Serving,
    prompts: list[PromptInput],
    add_special_tokens: bool | None,
    caller: Caller,
    truncation: Truncation | None = None,
) -> list[PromptInput]:
    """Each prompt as it is where the engine's own tokenizing does, else its token ids."""
    adds = add_special_tokens is not False
    texts = {place: text for place, text in enumerate(prompts) if isinstance(text, str) and text}
    if not texts or (adds and can_inline(serving, list(texts.values()))):
        return prompts
    names = ["prompt" if len(prompts) == 1 else f"prompt[{place}]" for place in texts]
    job = EncodeJob(
        texts=list(texts.values()),
        names=names,
        add_special_tokens=adds,
        max_model_len=serving.llm.facts.max_model_len,
        truncation=truncation,
    )
    encoded = dict(zip(texts, await _run_for_ids(serving, job, caller), strict=True))
    return [encoded.get(place, prompt) for place, prompt in enumerate(prompts)]


async def prepare_params(
    serving: Serving,
    params: SamplingParams,
    caller: Caller,
    source: GrammarJob | None,
    *,
    search: BeamSearch | None = None,
    logprobs_name: str = "logprobs",
) -> PreparedParams:
    """Parameters that fit the engine, for all prompts of a request. Raises InputErrors and ApiErrors.

    `source`: what the output has to look like. logprobs_name: the request's field that has become `logprobs`.
    """
    if search is not None:
        return serving.llm.prepare_params(make_search_params(params), search=search)
    try:
        prepared = await _prepare(serving, params, caller)
    except SamplingParamsError as error:
        if error.field != "logprobs":
            raise
        raise SamplingParamsError(logprobs_name, error.value, error.allowed) from None
    if source is None:
        return prepared
    return msgspec.structs.replace(prepared, grammar=await compile_format(serving, source, caller))


async def _prepare(serving: Serving, params: SamplingParams, caller: Caller) -> PreparedParams:
    if serving.llm.tokenizer is None or not params.bad_words:
        return serving.llm.prepare_params(params)
    texts = list_bad_word_texts(params.bad_words)
    if can_inline(serving, texts):
        return serving.llm.prepare_params(params)
    job = EncodeJob(texts=texts, names=["bad_words"] * len(texts), add_special_tokens=False)
    return serving.llm.prepare_params(params, await _run_for_ids(serving, job, caller))


def can_inline(serving: Serving, texts: Sequence[str]) -> bool:
    """Whether texts may be tokenized in the event loop: they are short, and so is the time for them."""
    return sum(map(len, texts)) <= MAX_INLINE_LENGTH and serving.tokenizer.is_predictable


async def render_chat(serving: Serving, conversation: Conversation, caller: Caller) -> list[int]:
    """Token ids of a conversation by the model's chat template.

    Raises ApiError for messages that are malformed, refused by the template or too long.
    """
    check_conversation(serving, conversation)
    (ids,) = await _run_for_ids(serving, conversation, caller)
    return ids


def check_conversation(serving: Serving, conversation: Conversation) -> None:
    """Raise FieldError for what can be seen at once."""
    limits = serving.options.limits
    if not serving.tokenizer.has_chat_template:
        instead = "/v1/completions" if "generate" in serving.llm.facts.tasks else "texts instead"
        raise FieldError(conversation.param, "a conversation", f"{instead}: this model has no chat template")
    if len(conversation.messages) > limits.max_messages:
        allowed = f"at most {limits.max_messages} (max_messages)"
        raise FieldError(conversation.param, f"{len(conversation.messages)} messages", allowed)
    allowed = f"at most {limits.max_messages} in all messages (max_messages)"
    num_parts = sum(
        len(message.content) for message in conversation.messages if isinstance(message.content, list)
    )
    if num_parts > limits.max_messages:
        raise FieldError(f"{conversation.param}.content", f"{num_parts} parts", allowed)
    num_calls = sum(len(message.tool_calls) for message in conversation.messages if message.tool_calls)
    if num_calls > limits.max_messages:
        raise FieldError(f"{conversation.param}.tool_calls", f"{num_calls} calls", allowed)
    for name in conversation.variables or ():
        if name in _RESERVED_VARIABLES:
            raise FieldError(f"chat_template_kwargs.{name}", name, "a name that the server does not set")


async def decode_prompt(serving: Serving, token_ids: list[int], caller: Caller) -> str:
    """Text of a prompt's token ids, special tokens shown."""
    if len(token_ids) <= _MAX_INLINE_IDS:
        return serving.tokenizer.decode(token_ids, skip_special_tokens=False)
    answer = await serving.text.run(DecodeJob(token_ids=encode_token_ids(token_ids)), caller.tenant)
    assert isinstance(answer, Text)
    return answer.text


async def answer_by_text(serving: Serving, job: TextJob, caller: Caller) -> Response:
    """The answer to a request that a text process makes whole."""
    answer = await serving.text.run(job, caller.tenant)
    assert isinstance(answer, Body)
    return Response(answer.json, media_type="application/json")


async def _run_for_ids(serving: Serving, job: TextJob, caller: Caller) -> list[list[int]]:
    answer = await serving.text.run(job, caller.tenant)
    assert isinstance(answer, TokenIds)
    prompts: list[list[int]] = []
    for packed in answer.packed:
        if len(packed) > _LARGE_IDS_BYTES:  # the event loop has other things to do as well
            await asyncio.sleep(0)
        prompts.append(decode_token_ids(packed))
    return prompts
