"""Asks a server for a whole answer over gRPC; after a broken connection or UNAVAILABLE it asks again."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import msgspec

from ...frontend.grpc import quire_engine_pb2 as pb
from ...ipc.errors import QuireError
from .asks import Ask
from .record import Golden, Record

_METHOD = "/quire.grpc.engine.QuireEngine/Generate"
_RETRY_PAUSE_S = 0.1
_BROKEN = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}


class GrpcEndpoint:
    """A server's gRPC port. ca_path: who signed its certificate; None: it speaks no TLS."""

    def __init__(self, address: str, ca_path: str | None) -> None:
        self._address = address
        self._credentials = None
        if ca_path is not None:
            self._credentials = grpc.ssl_channel_credentials(Path(ca_path).read_bytes())

    async def ask(self, ask: Ask, record: Record) -> None:
        """Fill the record. Tries again for as long as the caller lets it. Raises QuireError."""
        request = _make_request(ask).SerializeToString()
        while True:
            try:
                async with self._connect() as channel:
                    answer: Any = await channel.unary_unary(_METHOD)(request)
                break
            except grpc.aio.AioRpcError as error:
                if error.code() not in _BROKEN:
                    raise QuireError(f"{error.code().name}: {error.details()}") from None
                record.broken_at.append(time.monotonic())
            await asyncio.sleep(_RETRY_PAUSE_S)
        outputs = pb.GenerateResponse.FromString(answer).outputs
        token_ids = [token for one in outputs for token in one.token_ids]
        record.take_whole(Golden(token_ids, "".join(one.text for one in outputs)))

    def _connect(self) -> grpc.aio.Channel:
        if self._credentials is None:
            return grpc.aio.insecure_channel(self._address)
        return grpc.aio.secure_channel(self._address, self._credentials)


def _make_request(ask: Ask) -> pb.GenerateRequest:
    params = pb.SamplingParams(max_tokens=ask.max_tokens, ignore_eos=True)
    if ask.beam_width is not None:
        params.n, params.use_beam_search = ask.beam_width, True
    elif ask.seed is None:
        params.temperature = 0.0
    else:
        params.temperature, params.seed = 1.0, ask.seed
    if ask.constraint is not None:
        fields = dict(ask.constraint)
        if "json" in fields:
            fields["json"] = msgspec.json.encode(fields["json"]).decode()
        params.structured_outputs.CopyFrom(pb.StructuredOutputs(**fields))
    if isinstance(ask.prompt, str):
        return pb.GenerateRequest(text=ask.prompt, sampling_params=params)
    return pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=ask.prompt), sampling_params=params)
