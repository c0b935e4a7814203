"""X-Request-Id in every answer: what the caller calls its request, or a name that is made here."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ....ipc.protocol.messages import MAX_REQUEST_ID_LENGTH
from ..headers import find_header
from ..stream import REQUEST_ID_HEADER


class RequestIdMiddleware:
    """Puts the header into answers in place of what else may stand there."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        named = find_header(scope["headers"], REQUEST_ID_HEADER)
        is_usable = (
            named and len(named) <= MAX_REQUEST_ID_LENGTH and named.isascii() and named.decode().isprintable()
        )
        request_id = named if is_usable else uuid.uuid4().hex.encode()

        def send_named(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                others = [field for field in message.get("headers", ()) if field[0] != REQUEST_ID_HEADER]
                message["headers"] = [*others, (REQUEST_ID_HEADER, request_id)]
            return send(message)

        await self._app(scope, receive, send_named)
