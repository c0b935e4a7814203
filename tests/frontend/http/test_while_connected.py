"""run_while_connected: work that ends when its client leaves, and only then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from quire.frontend.http.stream import GONE_EXTENSION, run_while_connected
from starlette.requests import ClientDisconnect

OnGone = Callable[[], None] | None


class _Client:
    """Says that it has left, if it is to before the work begins or when it is told."""

    def __init__(self, is_gone: bool = False) -> None:
        self._is_gone = is_gone
        self.on_gone: OnGone = None
        self.scope: dict[str, Any] = {"extensions": {GONE_EXTENSION: self._tell}}

    def _tell(self, on_gone: OnGone) -> None:
        self.on_gone = on_gone
        if on_gone is not None and self._is_gone:
            on_gone()


async def _return(value: int, begun: list[int]) -> int:
    begun.append(value)
    await asyncio.sleep(0)
    return value


def test_work_of_a_client_that_stays_has_its_result_and_is_forgotten() -> None:
    client = _Client()
    assert asyncio.run(run_while_connected(client.scope, _return(1, []))) == 1
    assert client.on_gone is None
    assert asyncio.run(run_while_connected({}, _return(2, []))) == 2  # nobody can leave


def test_work_of_a_client_that_has_left_does_not_begin() -> None:
    begun: list[int] = []
    with pytest.raises(ClientDisconnect):
        asyncio.run(run_while_connected(_Client(is_gone=True).scope, _return(1, begun)))
    assert not begun


async def test_work_ends_where_it_waits_when_the_client_leaves_and_its_task_goes_on() -> None:
    client, ended = _Client(), asyncio.Event()

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    asyncio.get_running_loop().call_soon(lambda: client.on_gone and client.on_gone())
    with pytest.raises(ClientDisconnect):
        await run_while_connected(client.scope, wait())
    assert ended.is_set()
    assert not asyncio.current_task().cancelling()  # type: ignore[union-attr]
    await asyncio.sleep(0)  # which a cancellation that is left over would end


async def test_a_task_that_somebody_else_cancels_is_cancelled() -> None:
    client = _Client()
    task = asyncio.ensure_future(run_while_connected(client.scope, asyncio.sleep(60)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert client.on_gone is None
