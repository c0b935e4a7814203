"""Fields of requests that say nothing about the answer: clients send them, and they are taken and left.

What would change an answer and is not supported is not here: `endpoints/unsupported.py` refuses it.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ....ipc.messages import RequestName

# OpenAI's limits. An answer repeats them, so a stream would hold whatever they are.
User = Annotated[str, Meta(max_length=512)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


class SilentFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's, then vLLM's. request_id: as X-Request-Id, which goes before it."""

    user: User | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    client_metadata: dict[str, Any] | None = None
    request_id: RequestName | None = None
    session_id: str | None = None
    stream_interval: Annotated[int, Meta(ge=1)] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None
