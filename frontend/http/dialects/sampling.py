"""A request's sampling fields -> SamplingParams, over what the model recommends; and BeamSearch.

`use_beam_search` is read as vLLM does: n is the width.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from ....ipc.errors import SamplingParamsError
from ....ipc.params.beam_search import BeamSearch
from ....ipc.params.sampling_params import SAMPLING_FIELDS, RequestOutputKind, SamplingParams
from ..bodies.schema import SamplingFields, SharedFields
from ..errors import FieldError
from ..serving import Serving
from .formats import find_format

# Fields that each route reads in its own way, though requests name them as SamplingParams does.
_OF_ROUTES = ("max_tokens", "logprobs", "structured_outputs")
# Fields of SamplingParams that a search goes by. temperature and seed change nothing of it, as in vLLM.
_USED_FIELDS = (
    *("n", "max_tokens", "ignore_eos", "include_stop_str_in_output"),
    *("skip_special_tokens", "spaces_between_special_tokens"),
)
_ALLOWED_FIELDS = {*_USED_FIELDS, "temperature", "seed"}
_DEFAULTS = dict(zip(SamplingParams.__struct_fields__, SamplingParams.__struct_defaults__, strict=True))


def make_params(serving: Serving, request: Any, max_tokens: int | None, **overrides: Any) -> SamplingParams:
    """What a request says of sampling, over what the model recommends.

    request: the body of any dialect that generates, with a field `stream`. own: what the
    dialect makes of its fields itself.
    """
    fields = {name: getattr(request, name) for name in _list_shared(type(request))}
    values = serving.default_sampling | {name: value for name, value in fields.items() if value is not None}
    default = serving.default_sampling.get("max_tokens")
    values["max_tokens"] = None if max_tokens == -1 else first_given(max_tokens, default)
    values.update(overrides)
    if isinstance(request, SharedFields) and request.vllm_xargs is not None:
        values["extra_args"] = _check_xargs(serving, request.vllm_xargs)
    kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    params = SamplingParams(**values, output_kind=kind)
    if request.stream and params.num_sequences > params.n:
        raise FieldError("best_of", params.best_of, "n with stream=true: which are best is known at the end")
    return params


def _check_xargs(serving: Serving, xargs: dict[str, Any]) -> dict[str, Any]:
    """What the engine's logits processors are to be told, by the name that a request has for it."""
    if not serving.llm.facts.logits_processors:
        allowed = "nothing: this engine has no logits processors (--logits-processors), which would read it"
        raise FieldError("vllm_xargs", xargs, allowed)
    try:
        SamplingParams(extra_args=xargs)
    except SamplingParamsError as error:
        raise FieldError("vllm_xargs", xargs, error.allowed) from None
    return xargs


@cache
def _list_shared(kind: type[msgspec.Struct]) -> list[str]:
    """Fields of SamplingParams that a request names, and means, likewise."""
    shared = set(kind.__struct_fields__).difference(_OF_ROUTES)
    return [name for name in SamplingParams.__struct_fields__ if name in shared]


def first_given(*values: int | None) -> int | None:
    """The first that is not None."""
    return next((value for value in values if value is not None), None)


def check_stream_options(request: SamplingFields) -> None:
    """Raise FieldError for options of a stream where there is none, as vLLM does, whatever they say."""
    if request.stream_options is not None and not request.stream:
        raise FieldError("stream_options", "given", "only with stream=true")


def check_logprob_token_ids(request: SamplingFields, has_logprobs: bool, allowed: str) -> None:
    """Raise FieldError for ids that no logprobs are asked of, as vLLM does."""
    ids = request.logprob_token_ids
    if ids is not None and (not ids or not has_logprobs):
        raise FieldError(
            "logprob_token_ids", ids, allowed if ids else "a list that must not be an empty list"
        )


def read_beam_search(request: SamplingFields) -> BeamSearch | None:
    """The search that a request asks for, None if it asks for none.

    Raises FieldError for a field that a search cannot go by, and one that needs a search.
    """
    if not request.use_beam_search:
        for name, off in (("length_penalty", 1.0), ("early_stopping", False)):
            if (value := getattr(request, name)) not in (None, off):
                raise FieldError(name, value, "only with use_beam_search=true")
        return None
    if request.stream:
        raise FieldError("stream", True, "false with use_beam_search: which are best is known at the end")
    for name in SAMPLING_FIELDS:
        value: Any = getattr(request, name, None)
        is_off = value is None or value is False or value == _DEFAULTS[name]
        if name not in _ALLOWED_FIELDS and not is_off:
            raise FieldError(name, value, "not given with use_beam_search=true")
    if (source := find_format(request)) is not None:
        name = source.place or "structured_outputs"
        raise FieldError(name, "given", "not given with use_beam_search=true")
    penalty = 1.0 if request.length_penalty is None else request.length_penalty
    width: int | None = getattr(request, "n", None)
    return BeamSearch(width or 1, penalty, request.early_stopping or False)


def make_search_params(params: SamplingParams) -> SamplingParams:
    """Of a request's parameters those that a search goes by: what the model recommends is for sampling."""
    return SamplingParams(temperature=0.0, **{name: getattr(params, name) for name in _USED_FIELDS})
