"""A request's sampling fields -> SamplingParams, over what the model recommends."""

from __future__ import annotations

from typing import Any

from ...ipc.sampling_params import RequestOutputKind, SamplingParams
from .schema import ChatCompletionRequest, CompletionRequest, ResponsesRequest, SamplingFields
from .serving import Serving

COMPLETION_MAX_TOKENS = 16  # OpenAI's default of /v1/completions; a chat's is what is left of the context

# Those that have the same name and meaning in a request and in SamplingParams.
_COMMON = (
    "n",
    "best_of",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "prompt_logprobs",
)
_OF_RESPONSES = ("temperature", "top_p", "seed", "stop")


def make_completion_params(serving: Serving, request: CompletionRequest) -> SamplingParams:
    """max_tokens 0, which OpenAI allows beside echo, generates one token that is not shown."""
    values = _collect(serving, request, _COMMON)
    values["max_tokens"] = _first(request.max_tokens, serving.default_sampling.get("max_tokens"))
    if values["max_tokens"] is None:
        values["max_tokens"] = COMPLETION_MAX_TOKENS
    values["max_tokens"] = max(values["max_tokens"], 1)
    values["logprobs"] = request.logprobs
    if request.echo and request.logprobs is not None:
        values["prompt_logprobs"] = _first(request.prompt_logprobs, request.logprobs)
    return _make(values, request)


def make_chat_params(serving: Serving, request: ChatCompletionRequest) -> SamplingParams:
    """Without a limit the answer may fill what is left of the context."""
    values = _collect(serving, request, _COMMON)
    asked = _first(request.max_completion_tokens, request.max_tokens)
    values["max_tokens"] = _first(asked, serving.default_sampling.get("max_tokens"))
    if request.logprobs:
        values["logprobs"] = request.top_logprobs or 0
    return _make(values, request)


def make_responses_params(
    serving: Serving, request: ResponsesRequest, wants_logprobs: bool
) -> SamplingParams:
    """As a chat's, with the fewer fields that /v1/responses has."""
    values = _collect(serving, request, _OF_RESPONSES)
    values["max_tokens"] = _first(request.max_output_tokens, serving.default_sampling.get("max_tokens"))
    if wants_logprobs:
        values["logprobs"] = request.top_logprobs or 0
    return _make(values, request)


def _collect(
    serving: Serving, request: SamplingFields | ResponsesRequest, names: tuple[str, ...]
) -> dict[str, Any]:
    given = {name: getattr(request, name) for name in names}
    return serving.default_sampling | {name: value for name, value in given.items() if value is not None}


def _make(values: dict[str, Any], request: SamplingFields | ResponsesRequest) -> SamplingParams:
    kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    return SamplingParams(**values, output_kind=kind)


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)
