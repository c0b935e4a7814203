"""grpc.health.v1.Health: whether the server takes requests, as HTTP's /health says. Check needs no key."""

from __future__ import annotations

import asyncio
import contextlib
from http import HTTPStatus

from grpc_health.v1 import health_pb2

from ...ipc.errors import describe_refusal
from ..openai.engines.served_models import WELL, ServedModels
from ..openai.errors import ApiError
from . import quire_engine_pb2 as pb
from .calls import Call, Method
from .messages import parse_message

_LOOK_S = 1.0  # between two looks of a Watch
_SERVICES = ("", *(service.full_name for service in pb.DESCRIPTOR.services_by_name.values()))
_Response = health_pb2.HealthCheckResponse


class HealthService:
    """Asks the server each time, so that nobody has to tell it of changes.

    Whoever has no key where one is wanted may check the server as a whole: its message is not read.
    """

    name = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

    def __init__(self, models: ServedModels) -> None:
        self._models = models
        self._closing = asyncio.Event()
        self.methods = {"Check": Method(self._check, is_open=True), "Watch": Method(self._watch)}

    def close(self) -> None:
        """End the Watches, which have no end of their own."""
        self._closing.set()

    async def _check(self, call: Call, message: bytes) -> None:
        service = parse_message(message, health_pb2.HealthCheckRequest).service
        if service not in _SERVICES:
            allowed = ", ".join(map(repr, _SERVICES))
            text = describe_refusal("service", service, f"one of {allowed}")
            raise ApiError(HTTPStatus.NOT_FOUND, text, param="service", code="unknown_service")
        await call.write(_Response(status=self._status).SerializeToString())

    async def _watch(self, call: Call, message: bytes) -> None:
        is_known = parse_message(message, health_pb2.HealthCheckRequest).service in _SERVICES
        said = None
        while True:
            is_last = self._closing.is_set()
            status = self._status if is_known else _Response.SERVICE_UNKNOWN
            if status != said:
                await call.write(_Response(status=status).SerializeToString())
                said = status
            if is_last:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._closing.wait()

    @property
    def _status(self) -> int:
        return _Response.SERVING if self._models.status in WELL else _Response.NOT_SERVING
