"""SnapshotFeed: one look a period for everybody who watches, and none for nobody. The page's policy."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections.abc import AsyncGenerator, Awaitable, Callable

import pytest
from quire.frontend.openai import live
from quire.frontend.openai.live import SnapshotFeed, make_content_security_policy
from quire.ipc.engine_views import SchedulerStats
from quire.ipc.errors import EngineDeadError

PERIOD_S = 0.01


class Engine:
    """Counts the looks; every snapshot is its number."""

    def __init__(self) -> None:
        self.num_looks = 0
        self.error: Exception | None = None
        self.looked = asyncio.Event()

    async def snapshot(self) -> SchedulerStats:
        self.num_looks += 1
        self.looked.set()
        if self.error is not None:
            raise self.error
        counts = dict.fromkeys(SchedulerStats.__struct_fields__, 0)
        return SchedulerStats(**{**counts, "num_running": self.num_looks})


def run(scenario: Callable[[Engine, SnapshotFeed], Awaitable[None]]) -> None:
    async def main() -> None:
        engine = Engine()
        await scenario(engine, SnapshotFeed(engine.snapshot, PERIOD_S))  # pyright: ignore

    asyncio.run(asyncio.wait_for(main(), 10))


async def take(events: AsyncGenerator[bytes, None], count: int) -> list[bytes]:
    return [await anext(events) for _ in range(count)]


def test_viewers_share_one_look_a_period():
    async def scenario(engine: Engine, feed: SnapshotFeed) -> None:
        viewers = [feed.watch() for _ in range(50)]
        seen = await asyncio.gather(*(take(events, 5) for events in viewers))
        assert all(events == seen[0] for events in seen)
        assert len(set(seen[0])) == 5
        assert engine.num_looks <= 6
        assert seen[0][0].startswith(b'data: {"num_running":1,')
        assert seen[0][0].endswith(b"}\n\n")
        for events in viewers:
            await events.aclose()

    run(scenario)


def test_nobody_asks_the_engine_when_nobody_watches():
    async def scenario(engine: Engine, feed: SnapshotFeed) -> None:
        assert engine.num_looks == 0
        first, second = feed.watch(), feed.watch()
        await asyncio.gather(take(first, 2), take(second, 2))
        assert feed.num_viewers == 2
        await first.aclose()
        await take(second, 2)
        await second.aclose()
        assert feed.num_viewers == 0
        engine.looked.clear()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.looked.wait(), 10 * PERIOD_S)
        third = feed.watch()
        await take(third, 1)
        assert engine.looked.is_set()
        await third.aclose()

    run(scenario)


def test_a_viewer_that_leaves_in_the_middle_of_a_wait_is_counted_out():
    async def scenario(engine: Engine, feed: SnapshotFeed) -> None:
        feed = SnapshotFeed(engine.snapshot, period_s=1000.0)  # pyright: ignore

        async def watch() -> None:
            async for _ in feed.watch():
                pass

        task = asyncio.create_task(watch())
        await engine.looked.wait()
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert feed.num_viewers == 0

    run(scenario)


def test_a_viewer_that_reads_slowly_misses_what_is_old():
    async def scenario(engine: Engine, feed: SnapshotFeed) -> None:
        fast, slow = feed.watch(), feed.watch()
        await asyncio.gather(take(fast, 1), take(slow, 1))
        await take(fast, 5)
        late = await anext(slow)
        assert f'"num_running":{engine.num_looks},'.encode() in late
        await fast.aclose()
        await slow.aclose()

    run(scenario)


def test_an_engine_that_is_gone_is_told_to_every_viewer_and_asked_again_by_the_next():
    async def scenario(engine: Engine, feed: SnapshotFeed) -> None:
        viewers = [feed.watch() for _ in range(3)]
        await asyncio.gather(*(take(events, 1) for events in viewers))
        engine.error = EngineDeadError("the core is gone")
        for ended in await asyncio.gather(*(take(events, 2) for events in viewers), return_exceptions=True):
            assert isinstance(ended, EngineDeadError)
        assert feed.num_viewers == 0
        engine.error = None
        again = feed.watch()
        assert await take(again, 2)
        await again.aclose()

    run(scenario)


def test_a_closed_feed_ends_every_stream_and_starts_none():
    async def scenario(engine: Engine, feed: SnapshotFeed) -> None:
        feed = SnapshotFeed(engine.snapshot, period_s=1000.0)  # pyright: ignore
        events = feed.watch()
        await take(events, 1)
        waiting = asyncio.create_task(take(events, 1))
        await asyncio.sleep(0)
        feed.close()
        with pytest.raises((StopAsyncIteration, RuntimeError)):
            await waiting
        assert [event async for event in feed.watch()] == []
        assert feed.num_viewers == 0

    run(scenario)


def test_the_policy_allows_the_pages_own_script_and_nothing_else():
    page = "<style>a{}</style><script>let x = 1;</script>"
    policy = dict(part.split(" ", 1) for part in make_content_security_policy(page).split("; "))
    digest = base64.b64encode(hashlib.sha256(b"let x = 1;").digest()).decode()
    assert policy["script-src"] == f"'sha256-{digest}'"
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert "unsafe" not in str(policy)


def test_the_page_loads_nothing_and_writes_no_markup():
    page = live._PAGE.read_text()
    for word in (
        "http://",
        "https://",
        "innerHTML",
        "outerHTML",
        "insertAdjacent",
        "document.write",
        "eval(",
    ):
        assert word not in page
    for word in (" src=", " onclick=", " style=", "EventSource"):
        assert word not in page


def test_the_page_has_a_cell_for_every_heading_and_shows_what_a_request_holds():
    page = live._PAGE.read_text()
    for table in ("requests", "clients"):
        headings = re.findall(
            r'<th scope="col">([^<]+)</th>', page.split(f'<table id="{table}"')[1].split("</table>")[0]
        )
        width = re.search(rf'fill\(byId\("{table}"\), [a-z.]+, (\d+),', page)
        assert width is not None
        assert int(width[1]) == len(headings)
        if table == "requests":
            assert f"cells[{headings.index('holds')}].textContent = size(request.held_bytes)" in page
