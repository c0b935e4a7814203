"""POST /invocations: the route that a body looks like it is meant for, as SageMaker's callers ask."""

from __future__ import annotations

from http import HTTPStatus

import msgspec
from msgspec import UNSET, Raw, UnsetType

from ..engines.served_models import ServedModels
from ..errors import ApiError

_UNKNOWN = "body: 'messages', 'prompt', 'input', 'text_1' or 'queries' with 'documents', or 'query'"


class _Fields(msgspec.Struct):
    """Those that tell what a body is; the values are not looked at."""

    model: str | None = None
    messages: Raw | UnsetType = UNSET
    prompt: Raw | UnsetType = UNSET
    input: Raw | UnsetType = UNSET
    text_1: Raw | UnsetType = UNSET
    queries: Raw | UnsetType = UNSET
    query: Raw | UnsetType = UNSET


def find_invoked(body: bytes, models: ServedModels) -> str:
    """The path of the route. Raises ApiErrors."""
    try:
        fields = msgspec.json.decode(body, type=_Fields)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(HTTPStatus.BAD_REQUEST, f"body: JSON ({error})", code="invalid_json") from None
    if fields.prompt is not UNSET:
        return "/v1/completions"
    if fields.text_1 is not UNSET or fields.queries is not UNSET:
        return "/score"
    if fields.query is not UNSET:
        return "/v1/rerank"
    tasks = models.find(fields.model).facts.tasks
    if fields.messages is not UNSET and "generate" in tasks:
        return "/v1/chat/completions"
    if fields.messages is UNSET and fields.input is UNSET:
        raise ApiError(HTTPStatus.BAD_REQUEST, _UNKNOWN, code="missing_field")
    if "embed" in tasks:
        return "/v1/embeddings"
    return "/classify" if "classify" in tasks else "/pooling"
