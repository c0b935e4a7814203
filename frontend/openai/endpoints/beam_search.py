"""`use_beam_search` of a request -> BeamSearch, as vLLM reads it: n is the width."""

from __future__ import annotations

from typing import Any

from ....ipc.beam_search import BeamSearch
from ....ipc.sampling_params import SAMPLING_FIELDS, SamplingParams
from ..bodies.schema import ChatCompletionRequest, CompletionRequest
from ..errors import FieldError
from .formats import find_format

# Fields of SamplingParams that a search goes by. temperature and seed change nothing of it, as in vLLM.
_USED_FIELDS = (
    *("n", "max_tokens", "ignore_eos", "include_stop_str_in_output"),
    *("skip_special_tokens", "spaces_between_special_tokens"),
)
_ALLOWED_FIELDS = {*_USED_FIELDS, "temperature", "seed"}
_DEFAULTS = dict(zip(SamplingParams.__struct_fields__, SamplingParams.__struct_defaults__, strict=True))


def read_beam_search(request: CompletionRequest | ChatCompletionRequest) -> BeamSearch | None:
    """The search that a request asks for, None if it asks for none.

    Raises FieldError for a field that a search cannot go by, and one that needs a search.
    """
    if not request.use_beam_search:
        for name in ("length_penalty", "early_stopping"):
            if getattr(request, name) is not None:
                raise FieldError(name, getattr(request, name), "only with use_beam_search=true")
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
