"""ReceiveGate: how many messages are received at once, so that all of them together are bounded. Fair."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from ..openai.room import Tally
from ..openai.text.turns import TurnQueue

_Turn = tuple[str, asyncio.Future[None]]  # of a tenant
_NO_BOUND = 2**31  # who waits holds no message, and the number of calls is bounded elsewhere


class ReceiveGate:
    """`num_places` that tenants share as ipc/fair_share.py says; who finds none waits for a turn."""

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._taken = Tally()
        self._waiting: TurnQueue[_Turn] = TurnQueue(_NO_BOUND, _NO_BOUND, _NO_BOUND)

    def has_place(self, tenant: str) -> bool:
        """Whether `place` would not wait."""
        return self._taken.has_room(tenant, 1, self._num_places)

    @asynccontextmanager
    async def place(self, tenant: str) -> AsyncGenerator[None, None]:
        """Hold a place for the block."""
        if self.has_place(tenant):
            self._taken.enter(tenant, 1)
        else:
            await self._wait(tenant)
        try:
            yield
        finally:
            self._leave(tenant)

    async def _wait(self, tenant: str) -> None:
        turn: _Turn = tenant, asyncio.get_running_loop().create_future()
        self._waiting.put(tenant, turn, 0)
        try:
            await turn[1]
        except asyncio.CancelledError:
            self._waiting.remove(tenant, turn)
            if not turn[1].cancelled():  # it was given a place meanwhile
                self._leave(tenant)
            raise

    def _leave(self, tenant: str) -> None:
        self._taken.leave(tenant, 1)
        if self._taken.amount < self._num_places and (turn := self._waiting.take()) is not None:
            next_tenant, is_next = turn
            self._taken.enter(next_tenant, 1)
            is_next.set_result(None)
