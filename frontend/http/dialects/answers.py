"""Answers of the pooling routes as JSON, around vectors that are JSON already."""

from __future__ import annotations

import time
from collections.abc import Iterable

import msgspec

from ..bodies.vectors import ApiVersion, BilledUnits, CohereMeta, PoolingUsage
from .vectors import join_list

_encode = msgspec.json.Encoder().encode


def write_list(answer_id: str, model: str, items: Iterable[bytes], num_tokens: int) -> bytes:
    """OpenAI's list of results, each of which is JSON."""
    return b'{"id":%b,"object":"list","created":%d,"model":%b,"data":%b,"usage":%b}' % (
        _encode(answer_id),
        int(time.time()),
        _encode(model),
        join_list(items),
        _encode(make_usage(num_tokens)),
    )


def make_usage(num_tokens: int) -> PoolingUsage:
    """Of a request that generates nothing."""
    return PoolingUsage(num_tokens, num_tokens)


def make_meta(num_tokens: int) -> CohereMeta:
    """The usage as Cohere's clients look for it."""
    return CohereMeta(ApiVersion("2"), BilledUnits(num_tokens))
