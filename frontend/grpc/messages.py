"""Protobuf messages -> a completions request, and the engine's outputs -> protobuf messages.

Fields are found by their names, so that the .proto is the only list of them; types and ranges are checked
where HTTP's are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from itertools import islice
from typing import Any, TypeVar

import msgspec
from google.protobuf.message import DecodeError, Message

from ...ipc.decoding import decode_json
from ...ipc.errors import PromptError
from ...ipc.params.sampling_params import MAX_ALLOWED_TOKEN_IDS, MAX_EXTRA_ARGS_BYTES, SAMPLING_FIELDS
from ..http.bodies.parsing import make_struct
from ..http.dialects.completions import CompletionRequest
from ..http.errors import ApiError, FieldError
from ..logprobs import Logprob
from ..outputs import CompletionOutput, RequestOutput
from ..requests.prompts import describe_length
from . import quire_engine_pb2 as pb

MAX_REQUEST_ID_LENGTH = 200
_MAX_ITEMS = MAX_ALLOWED_TOKEN_IDS + 1  # of a list or map: one more than any may have, for the check to see
_OWN_FIELDS = ("request_id", "text", "tokenized", "sampling_params")  # not a completions request's

M = TypeVar("M", bound=Message)


def parse_message(data: bytes, kind: type[M]) -> M:
    """The message of these bytes; raises ApiError with status 400."""
    try:
        return kind.FromString(data)
    except DecodeError:
        text = f"message: expected a {kind.DESCRIPTOR.full_name}, with texts in UTF-8"
        raise ApiError(HTTPStatus.BAD_REQUEST, text, code="invalid_message") from None


def read_generate_request(
    message: pb.GenerateRequest, max_model_len: int, is_stream: bool
) -> tuple[str | None, CompletionRequest]:
    """The caller's id, None if it was left out, and the request.

    Raises ApiErrors and InputErrors that name the field.
    """
    values = _read_fields(message.sampling_params)
    values.update({name: value for name, value in _read_fields(message).items() if name not in _OWN_FIELDS})
    if values.get("max_tokens") == 0:
        raise FieldError("max_tokens", 0, SAMPLING_FIELDS["max_tokens"].describe_allowed(0))
    if "vllm_xargs" in values:
        values["vllm_xargs"] = _read_object("vllm_xargs", values["vllm_xargs"])
    values["prompt"] = _read_prompt(message, max_model_len)
    values["stream"] = is_stream
    return _read_request_id(message), make_struct(values, CompletionRequest)


def make_response(request_id: str, output: RequestOutput, has_prompt_logprobs: bool) -> bytes:
    """A GenerateResponse. has_prompt_logprobs: with the prompt's, if the output has them."""
    response = pb.GenerateResponse(
        request_id=request_id,
        outputs=[_make_output(completion) for completion in output.outputs],
        finished=output.finished,
    )
    if has_prompt_logprobs and output.prompt_logprobs is not None:
        response.prompt_logprobs.extend(map(_make_position, output.prompt_logprobs))
    if output.finished:
        response.usage.prompt_tokens = len(output.prompt_token_ids)
        if output.metrics is not None:
            response.usage.completion_tokens = output.metrics.num_generation_tokens
        response.usage.cached_tokens = output.num_cached_tokens or 0
    return response.SerializeToString()


def _read_fields(message: Message) -> dict[str, Any]:
    """Name -> value of the fields that were given."""
    return {field.name: _make_plain(value) for field, value in message.ListFields()}


def _make_plain(value: Any) -> Any:
    """Messages, lists and maps as Python's own, cut where they are too long for any field."""
    if isinstance(value, Message):
        return _read_fields(value)
    if isinstance(value, Mapping):
        return {str(key): number for key, number in islice(value.items(), _MAX_ITEMS)}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return list(islice(value, _MAX_ITEMS))
    return value


def _read_object(name: str, text: str) -> dict[str, Any]:
    """What the text of a field has, in which no type of protobuf's would do."""
    try:
        if len(text) <= MAX_EXTRA_ARGS_BYTES:
            return decode_json(text, dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        pass
    raise FieldError(name, text, f"a JSON object of at most {MAX_EXTRA_ARGS_BYTES} bytes, as text")


def _read_prompt(message: pb.GenerateRequest, max_model_len: int) -> str | list[int]:
    kind = message.WhichOneof("prompt")
    if kind is None:
        text = "prompt: required, text or tokenized"
        raise ApiError(HTTPStatus.BAD_REQUEST, text, param="prompt", code="missing_field")
    if kind == "text":
        return message.text
    ids = message.tokenized.input_ids
    if not ids:
        raise PromptError("prompt", [], "at least one token id")
    if len(ids) >= max_model_len:  # before millions become a list
        allowed = describe_length(max_model_len)
        raise FieldError("prompt", f"{len(ids)} tokens", allowed, "context_length_exceeded")
    return list(ids)


def _read_request_id(message: pb.GenerateRequest) -> str | None:
    if not message.HasField("request_id"):
        return None
    name = message.request_id
    if not 1 <= len(name) <= MAX_REQUEST_ID_LENGTH:
        raise FieldError("request_id", name, f"a text of 1 to {MAX_REQUEST_ID_LENGTH} characters")
    return name


def _make_output(completion: CompletionOutput) -> pb.CompletionOutput:
    made = pb.CompletionOutput(
        index=completion.index,
        text=completion.text,
        token_ids=completion.token_ids,
        cumulative_logprob=completion.cumulative_logprob,
        finish_reason=completion.finish_reason,
        logprobs=map(_make_position, completion.logprobs or ()),
    )
    if isinstance(completion.stop_reason, str):
        made.stop_text = completion.stop_reason
    elif completion.stop_reason is not None:
        made.stop_token_id = completion.stop_reason
    return made


def _make_position(entries: dict[int, Logprob] | None) -> pb.PositionLogprobs:
    """The token itself is the first of its entries."""
    made = [
        pb.Logprob(
            token_id=token_id, logprob=entry.logprob, rank=entry.rank, decoded_token=entry.decoded_token or ""
        )
        for token_id, entry in (entries or {}).items()
    ]
    return pb.PositionLogprobs(entries=made)
