"""Places for messages that are being received: bounded, in turns, and given back however a call ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from quire.frontend.grpc.calls import ReceiveGate


class Calls:
    """Calls that hold a place until they are told to leave it."""

    def __init__(self, gate: ReceiveGate) -> None:
        self.inside: list[str] = []
        self._gate = gate
        self._leave: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def begin(self, name: str) -> None:
        """`name`: the tenant, and a number."""
        self._leave[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._run(name))
        await self.settle()

    async def end(self, name: str) -> None:
        self._leave[name].set()
        await self.tasks[name]
        await self.settle()

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def _run(self, name: str) -> None:
        async with self._gate.place(name[0]):
            self.inside.append(name)
            try:
                await self._leave[name].wait()
            finally:
                self.inside.remove(name)


def run(scenario: Callable[[Calls], Awaitable[None]], num_places: int) -> None:
    async def main() -> None:
        gate = ReceiveGate(num_places)
        calls = Calls(gate)
        await scenario(calls)
        for name in list(calls.tasks):
            if not calls.tasks[name].cancelled():
                await calls.end(name)
        assert not gate._taken.amount

    asyncio.run(main())


def test_who_finds_no_place_waits_for_one() -> None:
    async def scenario(calls: Calls) -> None:
        for name in ("a1", "a2", "a3"):
            await calls.begin(name)
        assert calls.inside == ["a1", "a2"]
        await calls.end("a1")
        assert calls.inside == ["a2", "a3"]

    run(scenario, num_places=2)


def test_another_tenant_gets_its_share_when_one_has_taken_all() -> None:
    async def scenario(calls: Calls) -> None:
        for name in ("a1", "a2", "a3", "b1", "b2"):
            await calls.begin(name)
        assert calls.inside == ["a1", "a2", "b1"]
        for name in ("a1", "a2"):
            await calls.end(name)
        assert set(calls.inside) == {"b1", "a3"}  # one place too many was taken
        await calls.end("b1")
        assert set(calls.inside) == {"a3", "b2"}

    run(scenario, num_places=2)


def test_who_gives_up_waiting_leaves_no_trace() -> None:
    async def scenario(calls: Calls) -> None:
        for name in ("a1", "a2", "a3"):
            await calls.begin(name)
        calls.tasks["a2"].cancel()
        await calls.settle()
        await calls.end("a1")
        assert calls.inside == ["a3"]

    run(scenario, num_places=1)


def test_a_place_given_to_who_gives_up_in_that_moment_goes_to_the_next() -> None:
    async def scenario(calls: Calls) -> None:
        for name in ("a1", "a2", "a3"):
            await calls.begin(name)
        calls._leave["a1"].set()
        await asyncio.sleep(0)  # a1 leaves, and hands its place to a2, which has not run
        calls.tasks["a2"].cancel()
        await calls.settle()
        assert calls.inside == ["a3"]

    run(scenario, num_places=1)
