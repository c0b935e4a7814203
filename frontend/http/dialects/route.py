"""PostRoute: what answers a POST. A dialect is a module of this folder, with its rows of them as `ROUTES`."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from starlette.responses import Response

from ....ipc.protocol.messages import EngineFacts
from ..caller import Caller
from ..serving import Serving

Refused = dict[str, tuple[str, Callable[[Any], bool]]]
"""By field: what is allowed, and whether a value is. With another the answer would not be what is asked."""


def is_off(value: Any) -> bool:
    """Whether a value asks for nothing."""
    return value is None or value is False or value in ([], {}, "")


REFUSED_BY_ALL: Refused = {
    "kv_transfer_params": ("none: KV caches are not transferred", is_off),
    "ec_transfer_params": ("none: encoder caches are not transferred", is_off),
    "watermarking": ("false: watermarks are not supported", is_off),
}


class PostRoute(msgspec.Struct, frozen=True):
    """What answers a POST to `path`. The first sentence of the handler's docstring is shown in docs/http.md.

    body: what it is decoded as. task: what the model has to be able to do, or what says so of a request;
    None: nothing.
    """

    path: str
    body: type[msgspec.Struct]
    handler: Callable[[Serving, Any, Caller], Coroutine[Any, Any, Response]]
    task: str | Callable[[EngineFacts, Any], str] | None = None
    refused: Refused = {}
