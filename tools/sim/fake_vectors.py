"""The vectors of FakeWorkers: hashes of prompt and position, so that one that is lost or wrong shows."""

from __future__ import annotations

import zlib
from array import array

from ...ipc.params.pooling_params import PoolingParams
from ...ipc.protocol.messages import EngineCoreRequest
from ...ipc.protocol.token_ids import count_token_ids
from ...ipc.spec.model_spec import ModelSpec

_MODULUS = 997


def pooled_at(prompt: bytes, params: PoolingParams, spec: ModelSpec, first: int, count: int) -> bytes:
    """The vectors of `count` tokens of this prompt from `first` on."""
    assert spec.pooling is not None
    width = params.dimensions or spec.pooling.count_width(spec.hidden_size)
    asked = repr((params.task, params.dimensions, params.use_activation)).encode()
    seed = zlib.crc32(asked, zlib.crc32(prompt))
    digests = [zlib.crc32(position.to_bytes(4, "little"), seed) for position in range(first, first + count)]
    return b"".join(
        array("f", [(digest + place) % _MODULUS for place in range(width)]).tobytes() for digest in digests
    )


def pool_chunk(
    prompt: bytes, params: PoolingParams, spec: ModelSpec, start: int, count: int, *, is_complete: bool
) -> bytes:
    """What is answered when so many tokens were computed from `start` on; b"": nothing yet."""
    if params.is_token_wise:
        return pooled_at(prompt, params, spec, start, count)
    return pooled_at(prompt, params, spec, count_token_ids(prompt) - 1, 1) if is_complete else b""


def expected_pooled(request: EngineCoreRequest, spec: ModelSpec) -> bytes:
    """What an undisturbed run answers with."""
    prompt, params = request.prompt_token_ids, request.pooling_params
    assert params is not None
    return pool_chunk(prompt, params, spec, 0, count_token_ids(prompt), is_complete=True)


def may_have_hit(params: PoolingParams, spec: ModelSpec) -> bool:
    """Whether cached tokens may stand for a part of the prompt."""
    return spec.pooling is not None and spec.pooling.pools == ("last",) and not params.is_token_wise
