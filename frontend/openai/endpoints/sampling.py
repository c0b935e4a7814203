"""A request's sampling fields -> SamplingParams, over what the model recommends."""

from __future__ import annotations

from functools import cache
from typing import Any

from ....ipc.sampling_params import RequestOutputKind, SamplingParams
from ..bodies.schema import ChatCompletionRequest, CompletionRequest, ResponsesRequest, SamplingFields
from ..errors import FieldError
from ..serving import Serving

COMPLETION_MAX_TOKENS = 16  # OpenAI's default of /v1/completions; a chat's is what is left of the context

# Fields that each route reads in its own way, though requests name them as SamplingParams does.
_OF_ROUTES = ("max_tokens", "logprobs")


def make_completion_params(serving: Serving, request: CompletionRequest) -> SamplingParams:
    """max_tokens 0, which OpenAI allows beside echo, generates one token that is not shown."""
    values = _collect(serving, request)
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
    values = _collect(serving, request)
    asked = _first(request.max_completion_tokens, request.max_tokens)
    values["max_tokens"] = _first(asked, serving.default_sampling.get("max_tokens"))
    if request.logprobs:
        values["logprobs"] = request.top_logprobs or 0
    return _make(values, request)


def make_responses_params(
    serving: Serving, request: ResponsesRequest, wants_logprobs: bool
) -> SamplingParams:
    """As a chat's, with the fewer fields that /v1/responses has."""
    values = _collect(serving, request)
    values["max_tokens"] = _first(request.max_output_tokens, serving.default_sampling.get("max_tokens"))
    if wants_logprobs:
        values["logprobs"] = request.top_logprobs or 0
    return _make(values, request)


def _collect(serving: Serving, request: SamplingFields | ResponsesRequest) -> dict[str, Any]:
    given = {name: getattr(request, name) for name in _list_shared(type(request))}
    return serving.default_sampling | {name: value for name, value in given.items() if value is not None}


@cache
def _list_shared(kind: type[SamplingFields | ResponsesRequest]) -> list[str]:
    """Fields of SamplingParams that a request names, and means, likewise."""
    shared = set(kind.__struct_fields__).difference(_OF_ROUTES)
    return [name for name in SamplingParams.__struct_fields__ if name in shared]


def _make(values: dict[str, Any], request: SamplingFields | ResponsesRequest) -> SamplingParams:
    kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    params = SamplingParams(**values, output_kind=kind)
    if request.stream and params.num_sequences > params.n:
        raise FieldError("best_of", params.best_of, "n with stream=true: which are best is known at the end")
    return params


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)
