"""API keys: one pure-ASGI layer around every route but those that say whether the server is up."""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Iterable
from hashlib import sha256
from http import HTTPStatus

from starlette.types import ASGIApp, Receive, Scope, Send

from ....ipc.protocol.rights import list_open
from ..caller import Caller
from ..errors import ApiError, make_error_response

OPEN_PATHS = frozenset(list_open())
CALLER_KEY = "quire.caller"  # of scope["state"]
STRANGER = Caller(is_stranger=True)
_KEY_HEADERS = (b"x-api-key", b"api-key")  # whose value is the key

Headers = Iterable[tuple[bytes, bytes]]


def hash_key(key: str) -> str:
    """What is kept of an API key."""
    return sha256(key.encode()).hexdigest()


class ApiKeys:
    """The keys of a server, as hashes; without any, everyone is let in."""

    def __init__(self, key_hashes: Iterable[str], server_id: str = "") -> None:
        """server_id: whose callers those without a key are."""
        self._key_hashes = tuple(key_hashes)
        self._keyless = Caller(server=server_id)

    def identify(self, headers: Headers) -> Caller | None:
        """Who asks, None without one of the keys.

        Every key is compared, whether one has matched or not, so that the time tells nothing.
        """
        if not self._key_hashes:
            return self._keyless
        hashes = [hash_key(key) for key in _read_keys(headers)]
        pairs = [(sent, known) for sent in hashes for known in self._key_hashes]
        matching = [sent for sent, known in pairs if hmac.compare_digest(sent, known)]
        return Caller(matching[0]) if matching else None


class ApiKeyMiddleware:
    """Lets in who has one of the keys.

    It comes as `Authorization: Bearer KEY`, for browsers as a password, as Anthropic's `x-api-key: KEY`, or
    as Azure's `api-key: KEY`.

    A caller whom the connection has identified stands in the scope's state under CALLER_KEY.
    """

    def __init__(self, app: ASGIApp, key_hashes: Iterable[str], server_id: str = "") -> None:
        self._app = app
        self._keys = ApiKeys(key_hashes, server_id)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        caller = state.get(CALLER_KEY) or self._keys.identify(scope["headers"])
        if caller is None and scope["path"] not in OPEN_PATHS:
            await _make_refusal(scope)(scope, receive, send)
            return
        state[CALLER_KEY] = caller or STRANGER
        await self._app(scope, receive, send)


def _read_keys(headers: Headers) -> list[str]:
    """The keys that were sent: one may come in each of these headers, and only one of them counts here."""
    sent: dict[bytes, str] = {}
    for name, value in headers:
        if name == b"authorization" or name in _KEY_HEADERS:
            sent.setdefault(name, value.decode("latin-1"))
    keys = [_read_authorization(sent.pop(b"authorization", "")), *(value.strip() for value in sent.values())]
    return [key for key in keys if key]


def _read_authorization(value: str) -> str:
    scheme, _, rest = value.partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(rest, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return ""
    return ""


def _make_refusal(scope: Scope) -> ASGIApp:
    accepted = next((value for name, value in scope["headers"] if name == b"accept"), b"")
    # A browser asks its user for a password only when told to by this header.
    scheme = "Basic" if b"text/html" in accepted else "Bearer"
    return make_error_response(
        ApiError(
            HTTPStatus.UNAUTHORIZED,
            "authorization: expected an API key of this server, as 'Authorization: Bearer KEY', "
            "'x-api-key: KEY' or 'api-key: KEY'",
            code="invalid_api_key",
            headers={"www-authenticate": f'{scheme} realm="quire"'},
        ),
        scope["path"],
    )
