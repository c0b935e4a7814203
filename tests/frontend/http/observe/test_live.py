"""SnapshotFeed: one look a period for everybody who watches, and none for nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from quire.frontend.http.caller import Caller
from quire.frontend.http.observe.live import SnapshotFeed
from quire.ipc.errors import EngineDeadError
from quire.ipc.protocol.engine_views import EngineSnapshot
from top_fakes import make_snapshot

PERIOD_S = 0.01


class Engine:
    """Counts the looks; every snapshot has its number."""

    def __init__(self) -> None:
        self.num_looks = 0
        self.error: Exception | None = None
        self.looked = asyncio.Event()

    async def snapshot(self) -> EngineSnapshot:
        self.num_looks += 1
        self.looked.set()
        if self.error is not None:
            raise self.error
        return make_snapshot(uptime_s=float(self.num_looks))


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def feed(engine: Engine) -> SnapshotFeed:
    return SnapshotFeed(engine.snapshot, PERIOD_S)


async def take(events: AsyncGenerator[bytes, None], count: int) -> list[bytes]:
    return [await anext(events) for _ in range(count)]


async def test_viewers_share_one_look_a_period(engine: Engine, feed: SnapshotFeed) -> None:
    viewers = [feed.watch(Caller()) for _ in range(50)]
    seen = await asyncio.gather(*(take(events, 5) for events in viewers))
    assert all(events == seen[0] for events in seen)
    assert len(set(seen[0])) == 5
    assert engine.num_looks <= 6
    assert b'"uptime_s":1.0,' in seen[0][0]
    assert seen[0][0].startswith(b"data: {")
    assert seen[0][0].endswith(b"}\n\n")
    for events in viewers:
        await events.aclose()


async def test_nobody_asks_the_engine_when_nobody_watches(engine: Engine, feed: SnapshotFeed) -> None:
    assert engine.num_looks == 0
    first, second = feed.watch(Caller()), feed.watch(Caller())
    await asyncio.gather(take(first, 2), take(second, 2))
    await first.aclose()
    await take(second, 2)
    await second.aclose()
    engine.looked.clear()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(engine.looked.wait(), 10 * PERIOD_S)
    third = feed.watch(Caller())
    await take(third, 1)
    assert engine.looked.is_set()
    await third.aclose()


async def test_a_viewer_that_reads_slowly_misses_what_is_old(engine: Engine, feed: SnapshotFeed) -> None:
    fast, slow = feed.watch(Caller()), feed.watch(Caller())
    await asyncio.gather(take(fast, 1), take(slow, 1))
    await take(fast, 5)
    late = await anext(slow)
    assert f'"uptime_s":{engine.num_looks}.0,'.encode() in late
    await fast.aclose()
    await slow.aclose()


async def test_an_engine_that_is_gone_is_told_to_every_viewer_and_asked_again_by_the_next(
    engine: Engine, feed: SnapshotFeed
) -> None:
    viewers = [feed.watch(Caller()) for _ in range(3)]
    await asyncio.gather(*(take(events, 1) for events in viewers))
    engine.error = EngineDeadError("the core is gone")
    for ended in await asyncio.gather(*(take(events, 2) for events in viewers), return_exceptions=True):
        assert isinstance(ended, EngineDeadError)
    engine.error = None
    again = feed.watch(Caller())
    assert await take(again, 2)
    await again.aclose()


async def test_a_closed_feed_ends_every_stream_and_starts_none(engine: Engine, feed: SnapshotFeed) -> None:
    feed = SnapshotFeed(engine.snapshot, period_s=1000.0)
    events = feed.watch(Caller())
    await take(events, 1)
    waiting = asyncio.create_task(take(events, 1))
    await asyncio.sleep(0)
    feed.close()
    with pytest.raises((StopAsyncIteration, RuntimeError)):
        await waiting
    assert [event async for event in feed.watch(Caller())] == []
