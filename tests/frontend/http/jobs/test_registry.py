"""Responses that run and are kept, in this process and in others of its group."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import msgspec
import pytest
import uvloop
from quire.frontend.http.errors import ApiError
from quire.frontend.http.jobs import peers as peers_module
from quire.frontend.http.jobs import registry as registry_module
from quire.frontend.http.jobs.event_log import EventLog
from quire.frontend.http.jobs.peers import PeerSockets, ResponseQuery, listen_for_peers
from quire.frontend.http.jobs.registry import ResponseRegistry
from quire.frontend.http.jobs.store import Record
from quire.frontend.http.limits import Limits
from quire.frontend.http.stream import Json

aborted: list[str] = []


async def abort(ids: list[str]) -> None:
    aborted.extend(ids)


def make_registry() -> ResponseRegistry:
    aborted.clear()
    return ResponseRegistry(Limits())


@asynccontextmanager
async def run_group(num_running: int = 2) -> AsyncGenerator[list[ResponseRegistry]]:
    """Processes of a group of two, of which so many run."""
    listeners = [listen_for_peers() for _ in range(2)]
    names = [listener.getsockname() for listener in listeners]
    registries = [make_registry() for _ in range(num_running)]
    for place, registry in enumerate(registries):
        await registry.join(PeerSockets(place, listeners[place].fileno(), names))
    try:
        yield registries
    finally:
        for registry in registries:
            registry.close()
        for listener in listeners:
            listener.close()


def begin(registry: ResponseRegistry, owner: str = "key", store: bool = True) -> Json:
    response: Json = {"id": registry.make_id(), "status": "in_progress", "store": store, "output": []}
    registry.begin(response, Record(owner, owner, (b"[]",), 0), abort)
    return response


def finish(registry: ResponseRegistry, response: Json, owner: str = "key") -> None:
    response["status"] = "completed"
    response["output"].append({"type": "message", "id": "msg-1", "content": []})
    registry.finish(response)
    registry.end(response["id"], owner)


async def expect_unknown(registry: ResponseRegistry, response_id: str, owner: str = "key") -> None:
    with pytest.raises(ApiError) as caught:
        await registry.ask(ResponseQuery("find", response_id, owner))
    assert (caught.value.status, caught.value.code) == (404, "response_not_found")


async def test_a_response_is_found_while_it_runs_and_after_it_has_ended() -> None:
    registry = make_registry()
    response = begin(registry)
    running = await registry.ask(ResponseQuery("find", response["id"], "key"))
    assert running.status == "running"
    assert msgspec.json.decode(running.response)["status"] == "in_progress"
    assert (await registry.ask(ResponseQuery("remove", response["id"], "key"))).status == "running"
    finish(registry, response)
    ended = await registry.ask(ResponseQuery("find", response["id"], "key"))
    assert (ended.status, ended.num_items, len(ended.items)) == ("ended", 1, 2)
    assert msgspec.json.decode(ended.response) == response
    assert (await registry.ask(ResponseQuery("cancel", response["id"], "key"))).status == "ended"
    await expect_unknown(registry, response["id"], "other")
    assert (await registry.ask(ResponseQuery("remove", response["id"], "key"))).status == "ended"
    for response_id in (response["id"], "", "resp-1", f"{response['id']}0", response["id"][:-1] + "9"):
        await expect_unknown(registry, response_id)
    registry.close()


async def test_what_is_not_to_be_kept_or_lost_its_client_is_not() -> None:
    registry = make_registry()
    finish(registry, secret := begin(registry, store=False))
    registry.end((left := begin(registry))["id"], "key")
    for response in (secret, left):
        await expect_unknown(registry, response["id"])
    assert registry.store.num_bytes == 0
    registry.close()


async def test_what_has_been_kept_long_enough_is_forgotten_though_nobody_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry_module, "_EXPIRY_PERIOD_S", 0.0)
    registry = ResponseRegistry(Limits(max_stored_s=0.01))
    for _ in range(2):  # and again after the store has been empty
        finish(registry, begin(registry))
        async with asyncio.timeout(5):
            while registry.store.num_bytes:
                await asyncio.sleep(0)
    assert registry._expiry is None


@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run])
def test_every_process_of_a_group_finds_ends_and_forgets_the_responses_of_the_others(
    monkeypatch: pytest.MonkeyPatch, runner: object
) -> None:
    async def scenario() -> None:
        async with run_group() as (one, other):
            response = begin(other)
            monkeypatch.setattr(registry_module, "_CANCEL_S", 0.01)  # its end waits for its reader
            assert (await one.ask(ResponseQuery("cancel", response["id"], "key"))).status == "running"
            assert aborted == [response["id"]]
            finish(other, response)
            found = await one.ask(ResponseQuery("find", response["id"], "key"))
            assert found == await other.ask(ResponseQuery("find", response["id"], "key"))
            await expect_unknown(one, response["id"], "another key")
            assert (await one.ask(ResponseQuery("remove", response["id"], "key"))).status == "ended"
            await expect_unknown(other, response["id"])

    runner(scenario())  # type: ignore[operator]


@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run])
def test_the_events_of_another_process_are_followed_until_they_end_or_it_is_lost(runner: object) -> None:
    async def read(events: AsyncGenerator[bytes, None]) -> int:
        return b"".join([data async for data in events]).count(b"\n\n")

    async def scenario() -> None:
        async with run_group() as (one, other):
            response, log = begin(other), EventLog()
            record = other.store.find(response["id"], "key")
            assert record is not None
            with pytest.raises(ApiError) as caught:
                await one.follow(response["id"], "key", -1)
            assert caught.value.param == "stream"
            record.log = log
            with pytest.raises(ApiError) as caught:
                await one.follow(response["id"], "another key", -1)
            assert caught.value.status == 404
            log.add([{"type": "x", "sequence_number": number} for number in range(3)])
            here, there = (
                await other.follow(response["id"], "key", 0),
                await one.follow(response["id"], "key", 0),
            )
            following = asyncio.gather(read(here), read(there))
            leaving = await one.follow(response["id"], "key", -1)
            await anext(leaving)
            await leaving.aclose()
            while len(log._waiting) != 2:
                await asyncio.sleep(0)
            log.add([{"type": "x", "sequence_number": 3}])
            log.close()
            assert await following == [3, 3]
            running = EventLog()
            running.add([{"type": "x", "sequence_number": 0}])
            record.log = running
            lost = await one.follow(response["id"], "key", -1)
            await anext(lost)
            assert other._peers is not None
            for task in asyncio.all_tasks():
                if "_serve" in repr(task):  # as when its process is killed
                    task.cancel()
            with pytest.raises(ApiError) as caught:
                await anext(lost)
            assert (caught.value.status, caught.value.code) == (503, "recovering")

    runner(scenario())  # type: ignore[operator]


async def test_who_follows_with_all_streams_that_there_are_takes_none_from_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers_module, "_MAX_FOLLOWING", 4)
    async with run_group() as (one, other):
        ids: dict[str, str] = {}
        for owner in ("greedy", "modest"):
            response = begin(other, owner)
            record = other.store.find(response["id"], owner)
            assert record is not None
            record.log, ids[owner] = EventLog(), response["id"]
            record.log.add([{"type": "x", "sequence_number": 0}])
        unread = [await one.follow(ids["greedy"], "greedy", -1) for _ in range(4)]
        for events in unread:
            await events.aclose()
        assert other._peers is not None
        while other._peers._following.amount:
            await asyncio.sleep(0)
        taken = [await one.follow(ids["greedy"], "greedy", -1) for _ in range(4)]
        for events in taken:
            await anext(events)
        with pytest.raises(ApiError) as caught:
            await one.follow(ids["greedy"], "greedy", -1)
        assert (caught.value.status, caught.value.code) == (429, "overloaded")
        events = await one.follow(ids["modest"], "modest", -1)
        assert b"sequence_number" in await anext(events)
        for left in (*taken, events):
            await left.aclose()
        while other._peers._following.amount:
            await asyncio.sleep(0)
        events = await one.follow(ids["greedy"], "greedy", -1)
        await anext(events)
        await events.aclose()


async def test_a_process_that_does_not_answer_costs_a_503_and_one_in_a_lost_ones_place_knows_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers_module, "_TIMEOUT_S", 0.05)
    async with run_group(num_running=1) as (one,):
        response_id = one.make_id()[:-2] + "01"
        with pytest.raises(ApiError) as caught:
            await one.ask(ResponseQuery("find", response_id, "key"))
        assert (caught.value.status, caught.value.code) == (503, "recovering")
    async with run_group() as (one, _):
        await expect_unknown(one, response_id)


async def test_what_is_no_question_disturbs_nobody() -> None:
    async with run_group() as (one, other):
        assert one._peers is not None
        for junk in (b"", b"\xff\xff\xff\xff", b"\0\0\0\x05junk!", b"\0\0\0\x05ju"):
            asking = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            asking.connect(one._peers._names[0])
            asking.setblocking(False)
            asking.sendall(junk)
            asking.shutdown(socket.SHUT_WR)
            assert await asyncio.get_running_loop().sock_recv(asking, 1) == b""
            asking.close()
        response = begin(one)
        assert (await other.ask(ResponseQuery("find", response["id"], "key"))).status == "running"
