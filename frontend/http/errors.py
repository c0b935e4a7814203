"""Errors as HTTP answers in OpenAI's shape: {"error": {"message", "type", "param", "code"}}.

Below /v1/messages they have Anthropic's: {"type": "error", "error": {"type", "message"}, "request_id"}; below
/api Ollama's: {"error": "..."}. One
function decides the status of every exception; routes, streams and the connection's own refusals use it.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Mapping
from http import HTTPStatus
from typing import Literal

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ...ipc.errors import (
    EngineDeadError,
    InputError,
    QuireError,
    RequestFailedError,
    describe_allowed,
    describe_refusal,
    shorten_name,
)
from .observe.access_log import note_cause

MESSAGES_PATH = "/v1/messages"
MESSAGES_ID_HEADER = "request-id"  # Anthropic's clients show it
RETRY_AFTER_S = "1"
_MAX_MESSAGE = 1000  # characters
_FAILURES: dict[str | None, tuple[HTTPStatus, Mapping[str, str] | None]] = {
    "queue_timeout": (HTTPStatus.SERVICE_UNAVAILABLE, {"retry-after": RETRY_AFTER_S}),
    "refused": (HTTPStatus.BAD_REQUEST, None),
    "bad_grammar": (HTTPStatus.BAD_REQUEST, None),
    # OpenAI's clients try a 500 twice more, and each try may cost three workers.
    "poison_request": (HTTPStatus.INTERNAL_SERVER_ERROR, {"x-should-retry": "false"}),
}
# Types that Anthropic's clients know by status; another 4xx is invalid_request_error, another 5xx api_error.
_MESSAGES_TYPES: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
}
_SAID = re.compile(r"(?<=the chat template) (says|failed): .*", re.DOTALL)
_logger = logging.getLogger("quire.serve")


class ErrorBody(msgspec.Struct, frozen=True):
    """What went wrong, for people (`message`) and for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorResponse(msgspec.Struct, frozen=True):
    """The body of every answer that is not a success."""

    error: ErrorBody


class MessagesErrorBody(msgspec.Struct, frozen=True):
    """What went wrong, for programs (`type`) and for people."""

    type: str
    message: str


class MessagesErrorResponse(msgspec.Struct, frozen=True, kw_only=True):
    """As ErrorResponse, below /v1/messages; an error within a stream has the same form."""

    type: Literal["error"] = "error"
    error: MessagesErrorBody
    request_id: str


class OllamaErrorResponse(msgspec.Struct, frozen=True):
    """As ErrorResponse, below /api; an error within a stream has the same form."""

    error: str


class ApiError(QuireError):
    """An error that knows its status. `param` names the field of the request, `code` is for programs.

    Neither it nor the message is longer than a reader wants, whatever of the request is in them.
    """

    def __init__(
        self,
        status: HTTPStatus,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        cause: str | None = None,
    ) -> None:
        """`cause`: what logs say of it; None: the message. It has nothing of a prompt."""
        self.status = status
        self.param = None if param is None else shorten_name(param)
        self.code = code
        self.headers = dict(headers or {})
        message = message if len(message) <= _MAX_MESSAGE else f"{message[:_MAX_MESSAGE]}..."
        self.cause = message if cause is None else cause
        super().__init__(message)


class FieldError(ApiError):
    """A field of a request cannot be used: 400 with the field, the value and what is allowed."""

    def __init__(self, field: str, value: object, allowed: str, code: str | None = None) -> None:
        super().__init__(
            HTTPStatus.BAD_REQUEST,
            describe_refusal(field, value, allowed),
            param=field,
            code=code,
            cause=_describe_field(field, allowed),
        )


def missing_field(field: str, allowed: str = "") -> ApiError:
    """400: a request needs the field."""
    text = f"{field}: required{f' ({allowed})' if allowed else ''}"
    return ApiError(HTTPStatus.BAD_REQUEST, text, param=field, code="missing_field")


def overloaded(message: str) -> ApiError:
    """429: nothing is wrong with the request, there is no room for it now."""
    return ApiError(
        HTTPStatus.TOO_MANY_REQUESTS, message, code="overloaded", headers={"retry-after": RETRY_AFTER_S}
    )


def unavailable(message: str, code: str) -> ApiError:
    """503 that closes the connection, so that a client's next try can reach another server."""
    headers = {"retry-after": RETRY_AFTER_S, "connection": "close"}
    return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, code=code, headers=headers)


def as_api_error(error: Exception) -> ApiError:
    """The answer to any exception of a request. What nobody raised on purpose is logged, and not shown.

    Its traceback goes: frames of tasks hang on it, and those hold the error again. Until the collector found
    that cycle the request's prompts would stay in memory.
    """
    answer = _find_answer(error)
    note_cause(answer.status, answer.cause)
    error.__traceback__ = None
    return answer


def _find_answer(error: Exception) -> ApiError:
    match error:
        case ApiError():
            return error
        case HTTPException():
            status = HTTPStatus(error.status_code)
            code = status.phrase.lower().replace(" ", "_")
            return ApiError(status, str(error.detail), code=code, headers=error.headers, cause=status.phrase)
        case InputError():
            code = "context_length_exceeded" if "max_model_len" in error.allowed else None
            cause = _describe_field(error.field, error.allowed)
            return ApiError(HTTPStatus.BAD_REQUEST, str(error), param=error.field, code=code, cause=cause)
        case RequestFailedError(code="overloaded"):
            return overloaded(str(error))
        case RequestFailedError():
            status, headers = _FAILURES.get(error.code, (HTTPStatus.INTERNAL_SERVER_ERROR, None))
            code = error.code or "request_failed"
            cause = code if status < HTTPStatus.INTERNAL_SERVER_ERROR else None  # a grammar's has parts of it
            return ApiError(status, str(error), code=code, headers=headers, cause=cause)
        case EngineDeadError():
            return unavailable(f"the engine has ended: {error}", "engine_away")
        case _:
            _logger.error("a request failed", exc_info=error)
            return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error, see the log", code="internal")


def _describe_field(field: str, allowed: str) -> str:
    """What is wrong, without the value and without what a chat template says, which may have text in it."""
    return f"{shorten_name(field)}: {describe_allowed(_SAID.sub('', allowed))[:_MAX_MESSAGE]}"


def is_messages_path(path: str) -> bool:
    """Whether clients of the path are Anthropic's."""
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


def is_ollama_path(path: str) -> bool:
    """Whether clients of the path are Ollama's."""
    return path.startswith("/api/")


def find_error_type(path: str) -> type[msgspec.Struct]:
    """What errors are answered as with a path."""
    if is_messages_path(path):
        return MessagesErrorResponse
    return OllamaErrorResponse if is_ollama_path(path) else ErrorResponse


def encode_error(error: ApiError) -> bytes:
    """The JSON body."""
    body = ErrorBody(str(error), _type_of(error.status), error.param, error.code)
    return msgspec.json.encode(ErrorResponse(body))


def encode_messages_error(error: ApiError, request_id: str) -> bytes:
    """The JSON body in Anthropic's form."""
    is_ours = error.status >= HTTPStatus.INTERNAL_SERVER_ERROR
    kind = _MESSAGES_TYPES.get(error.status, "api_error" if is_ours else "invalid_request_error")
    body = MessagesErrorBody(kind, str(error))
    return msgspec.json.encode(MessagesErrorResponse(error=body, request_id=request_id))


def encode_ollama_error(error: ApiError) -> bytes:
    """The JSON body in Ollama's form."""
    return msgspec.json.encode(OllamaErrorResponse(str(error)))


def encode_answer(error: ApiError, path: str) -> tuple[dict[str, str], bytes]:
    """Headers and JSON body, in the form that clients of the path know."""
    if is_ollama_path(path):
        return error.headers, encode_ollama_error(error)
    if not is_messages_path(path):
        return error.headers, encode_error(error)
    request_id = f"req_{uuid.uuid4().hex}"
    return error.headers | {MESSAGES_ID_HEADER: request_id}, encode_messages_error(error, request_id)


def make_error_response(error: Exception, path: str) -> Response:
    """The answer for an exception of a request for `path`."""
    api_error = as_api_error(error)
    headers, body = encode_answer(api_error, path)
    return Response(body, api_error.status, headers, media_type="application/json")


def _type_of(status: HTTPStatus) -> str:
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return "rate_limit_error"
    if status == HTTPStatus.UNAUTHORIZED:
        return "authentication_error"
    return "server_error" if status >= 500 else "invalid_request_error"
