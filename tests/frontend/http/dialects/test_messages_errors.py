"""Errors below /v1/messages, which Anthropic's clients read: their form, whoever refuses the request."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

import pytest
from openai_fakes import FakeLLM
from quire.frontend.http.errors import ApiError, encode_answer
from server_fakes import Peer

PATH = "/v1/messages"


def check_error(headers: dict[str, str], body: dict[str, Any], kind: str) -> None:
    """It has Anthropic's form, and one name in header and body."""
    assert body == {
        "type": "error",
        "error": {"type": kind, "message": body["error"]["message"]},
        "request_id": headers["request-id"],
    }
    assert body["request_id"].startswith("req_")


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (415, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_each_status_has_anthropics_type_below_its_path_only(status: int, kind: str) -> None:
    error = ApiError(HTTPStatus(status), "no", param="x", headers={"retry-after": "1"})
    for path in (PATH, f"{PATH}/count_tokens"):
        headers, body = encode_answer(error, path)
        check_error(headers, json.loads(body), kind)
        assert headers["retry-after"] == "1"
    for path in ("", "/v1/messagesx", "/v1/responses"):
        headers, body = encode_answer(error, path)
        assert json.loads(body)["error"]["param"] == "x"
        assert "request-id" not in headers


@pytest.mark.server(max_body_bytes=100_000, api_keys=("one",), options={"allowed_hosts": ("localhost",)})
@pytest.mark.parametrize(
    ("more", "kind"),
    [
        ("host: localhost\r\ncontent-length: 200000\r\n", "request_too_large"),
        (f"host: localhost\r\nx: {'x' * 70_000}\r\n", "invalid_request_error"),
        ("host: example.com\r\n", "permission_error"),
    ],
)
async def test_what_the_connection_refuses_is_told_in_the_paths_form(
    more: str, kind: str, llm: FakeLLM, peer: Peer
) -> None:
    await peer.say(f"POST {PATH}?beta=true HTTP/1.1\r\nx-api-key: one\r\n{more}\r\n".encode())
    _, head, body = await peer.read_answer()
    headers = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
    check_error(headers, json.loads(body), kind)
    assert not llm.calls
