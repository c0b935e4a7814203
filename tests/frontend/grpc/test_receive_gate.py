"""Places for messages that are being received: bounded, in turns, and given back however a call ends."""

from __future__ import annotations

import asyncio

import pytest
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

    async def end_all(self) -> None:
        for name, task in self.tasks.items():
            if not task.cancelled():
                await self.end(name)
        assert not self._gate._taken.amount

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


# What happens with so many places, and who is inside after that. 'a1': begins; '-a1': ends; '!a1': gives up.
@pytest.mark.parametrize(
    ("num_places", "steps", "inside"),
    [
        (2, "a1 a2 a3", {"a1", "a2"}),
        (2, "a1 a2 a3 -a1", {"a2", "a3"}),
        # Another tenant gets its share when one has taken all: one place too many is taken.
        (2, "a1 a2 a3 b1 b2", {"a1", "a2", "b1"}),
        (2, "a1 a2 a3 b1 b2 -a1 -a2", {"b1", "a3"}),
        (2, "a1 a2 a3 b1 b2 -a1 -a2 -b1", {"a3", "b2"}),
        # Who gives up waiting leaves no trace.
        (1, "a1 a2 a3 !a2 -a1", {"a3"}),
    ],
)
async def test_places_are_shared_and_given_back(num_places: int, steps: str, inside: set[str]) -> None:
    gate = ReceiveGate(num_places)
    calls = Calls(gate)
    for step in steps.split():
        if step.startswith("!"):
            calls.tasks[step[1:]].cancel()
            await calls.settle()
        elif step.startswith("-"):
            await calls.end(step[1:])
        else:
            await calls.begin(step)
    assert set(calls.inside) == inside
    await calls.end_all()


async def test_a_place_given_to_who_gives_up_in_that_moment_goes_to_the_next() -> None:
    calls = Calls(ReceiveGate(1))
    for name in ("a1", "a2", "a3"):
        await calls.begin(name)
    calls._leave["a1"].set()
    await asyncio.sleep(0)  # a1 leaves, and hands its place to a2, which has not run
    calls.tasks["a2"].cancel()
    await calls.settle()
    assert calls.inside == ["a3"]
    await calls.end_all()
