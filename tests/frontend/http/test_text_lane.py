"""Turns, bounds and deadlines of text jobs over a scripted process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from quire.frontend.http.text_process.jobs import Ready, Text, encode_body
from quire.frontend.http.text_process.lane import (
    EndedBy,
    JobEndedError,
    LaneLimits,
    TextLane,
    TextUnavailableError,
    TurnQueue,
    TurnQueueFullError,
)
from quire.frontend.text.bounded_jobs import FrameReader, make_frame


def test_owners_take_turns_and_each_keeps_its_order():
    queue: TurnQueue[str] = TurnQueue(10, 100, 1000)
    for item in ("a1", "a2", "a3", "b1", "c1", "b2"):
        queue.put(item[0], item, 1)
    assert [queue.take() for _ in range(7)] == ["a1", "b1", "c1", "a2", "b2", "a3", None]


def test_what_is_put_back_comes_first_and_what_is_removed_never():
    queue: TurnQueue[str] = TurnQueue(10, 100, 1000)
    for item in ("a1", "a2", "b1", "b2"):
        queue.put(item[0], item, 1)
    taken = [queue.take(), queue.take()]
    queue.put_back((item[0], item, 1) for item in taken if item is not None)
    queue.remove("b", "b2")
    queue.remove("b", "b3")
    assert [queue.take() for _ in range(4)] == ["a1", "b1", "a2", None]
    assert not queue


def test_an_owner_that_has_too_much_waiting_is_refused_with_the_numbers_and_others_are_not():
    queue: TurnQueue[str] = TurnQueue(2, 100, 150)
    queue.put("a", "of any size", 100_000)
    with pytest.raises(TurnQueueFullError, match="100000 bytes wait, and at most 100 may"):
        queue.put("a", "a2", 1)
    queue.put("b", "b1", 60)
    queue.put("b", "b2", 10)
    with pytest.raises(TurnQueueFullError, match="2 wait, and at most 2 may"):
        queue.put("b", "b3", 1)
    queue.put("c", "c1", 60)


def test_frames_come_apart_wherever_they_were_cut():
    data = make_frame(b"one", 0.5) + make_frame(b"") + make_frame(b"three")
    for size in (1, 5, 9, len(data)):
        reader = FrameReader()
        parts = [data[start : start + size] for start in range(0, len(data), size)]
        assert [frame for part in parts for frame in reader.feed(part)] == [
            (b"one", 0.5),
            (b"", 0.0),
            (b"three", 0.0),
        ]


class FakeProcess:
    """Notes what it is sent; answers, ends and dies when it is told to."""

    def __init__(self, on_body: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        self._on_body = on_body
        self._on_end = on_end
        self.sent: list[bytes] = []
        self.killed: list[str] = []
        self.pid = 1
        self.ended_by = EndedBy.LOSS
        self.is_closed = False

    def describe_exit(self) -> str:
        return "text (pid 1) was killed"

    def send(self, frame: bytes) -> None:
        self.sent += [body for body, _ in FrameReader().feed(frame)]

    def kill(self, because: str) -> None:
        self.killed.append(because)
        asyncio.get_running_loop().call_soon(self._on_end)

    def close(self) -> None:
        self.is_closed = True

    def ready(self) -> None:
        self._on_body(encode_body(Ready()))

    def answer(self, text: str) -> None:
        self._on_body(encode_body(Text(text)))

    def end(self) -> None:
        self._on_end()


class Lane:
    """A lane over fake processes, and the tasks that wait for it."""

    def __init__(self, idle_s: float | None = None, limit_s: float = 60.0, max_sent: int = 2) -> None:
        self.processes: list[FakeProcess] = []
        self.lane = TextLane(
            LaneLimits(
                limit_s=limit_s,
                max_jobs=8,
                max_bytes=100,
                max_total_bytes=100,
                max_sent=max_sent,
                idle_s=idle_s,
            ),
            self._make,
        )

    def _make(self, on_body: Callable[[bytes], None], on_end: Callable[[], None]) -> FakeProcess:
        self.processes.append(FakeProcess(on_body, on_end))
        return self.processes[-1]

    @property
    def process(self) -> FakeProcess:
        return self.processes[-1]

    async def ask(self, *bodies: bytes) -> list[asyncio.Task[object]]:
        tasks = [asyncio.ensure_future(self.lane.run(body, body[:1].decode())) for body in bodies]
        await asyncio.sleep(0)
        return tasks


async def test_jobs_wait_for_the_process_and_are_sent_in_turns():
    lane = Lane()
    tasks = await lane.ask(b"a1", b"a2", b"a3", b"b1")
    assert lane.process.sent == []
    lane.process.ready()
    assert lane.process.sent == [b"a1", b"b1"]
    lane.process.answer("A1")
    lane.process.answer("B1")
    assert lane.process.sent == [b"a1", b"b1", b"a2", b"a3"]
    assert [await tasks[0], await tasks[3]] == [Text("A1"), Text("B1")]
    lane.lane.close()
    for task in tasks[1:3]:
        with pytest.raises(TextUnavailableError, match="about to end"):
            await task
    assert lane.process.is_closed


@pytest.mark.parametrize("by", EndedBy)
async def test_the_job_that_ends_the_process_fails_alone(by: EndedBy):
    lane = Lane()
    tasks = await lane.ask(b"a1", b"b1", b"c1")
    lane.process.ready()
    lane.process.ended_by = by
    lane.process.end()
    with pytest.raises(JobEndedError) as caught:
        await tasks[0]
    assert caught.value.by == by
    assert len(lane.processes) == 2
    lane.process.ready()
    assert lane.process.sent == [b"b1", b"c1"]
    lane.process.answer("B1")
    lane.process.answer("C1")
    assert [await task for task in tasks[1:]] == [Text("B1"), Text("C1")]


async def test_a_process_that_says_nothing_is_killed_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("quire.frontend.http.text_process.lane.WALL_MARGIN_S", 0.0)
    lane = Lane(limit_s=0.001)
    (task,) = await lane.ask(b"a1")
    lane.process.ready()
    with pytest.raises(JobEndedError) as caught:
        await task
    assert caught.value.by == EndedBy.TIME
    assert lane.processes[0].killed == ["a text was not done after 0.006 s"]
    assert len(lane.processes) == 2  # the next short job does not wait for a start
    lane.lane.close()


async def test_a_process_that_does_not_start_is_tried_twice_and_then_told():
    lane = Lane()
    tasks = await lane.ask(b"a1", b"b1")
    lane.process.end()
    assert len(lane.processes) == 2
    lane.process.end()
    for task in tasks:
        with pytest.raises(TextUnavailableError, match="was killed"):
            await task
    (task,) = await lane.ask(b"a2")
    lane.process.ready()
    lane.process.answer("A2")
    assert await task == Text("A2")


async def test_a_process_that_has_nothing_to_do_is_ended_and_started_for_the_next_job():
    lane = Lane(idle_s=0.001)
    (task,) = await lane.ask(b"a1")
    lane.process.ready()
    lane.process.answer("A1")
    await task
    while lane.lane.pid is not None:
        await asyncio.sleep(0)
    assert lane.process.killed == ["it had nothing to do"]
    (task,) = await lane.ask(b"a2")
    assert len(lane.processes) == 2
    lane.process.ready()
    lane.process.answer("A2")
    assert await task == Text("A2")
    lane.lane.close()


async def test_a_job_that_nobody_waits_for_is_not_begun_and_takes_no_room():
    lane = Lane(max_sent=1)
    tasks = await lane.ask(b"a1", b"a" * 90, b"a2")
    lane.process.ready()
    tasks[1].cancel()
    await asyncio.sleep(0)
    (later,) = await lane.ask(b"a" * 91)
    lane.process.answer("A1")
    lane.process.answer("A2")
    assert lane.process.sent == [b"a1", b"a2", b"a" * 91]
    lane.process.answer("A3")
    assert await later == Text("A3")


async def test_a_long_job_is_ended_when_its_client_leaves_and_a_short_one_is_done():
    for idle_s, is_ended in ((60.0, True), (None, False)):
        lane = Lane(idle_s=idle_s)
        tasks = await lane.ask(b"a1", b"b1")
        lane.process.ready()
        tasks[0].cancel()
        await asyncio.wait(tasks[:1])
        await asyncio.sleep(0)
        assert len(lane.processes) == 1 + is_ended
        lane.process.ready()
        if not is_ended:
            lane.process.answer("A1")
        lane.process.answer("B1")
        assert await tasks[1] == Text("B1")
        lane.lane.close()
