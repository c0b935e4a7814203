"""Responses that run in the background: they go on without their client, and are taken up where it left."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from openai_fakes import AsgiClient, FakeLLM
from pydantic import TypeAdapter
from quire.frontend.http.jobs import registry as registry_module
from quire.frontend.http.jobs.store import ENDS
from quire.frontend.http.limits import Limits
from quire.frontend.http.options import ServerOptions
from quire.frontend.http.serving import Serving
from quire.ipc.errors import RequestFailedError

pytestmark = pytest.mark.app(max_model_len=2000)
PATH = "/v1/responses"
STREAM_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ASKED = {"input": "Hello?", "background": True}
PIECES = ("One", " two", " three", ".")


async def wait_for_status(client: AsgiClient, response_id: str, *statuses: str, **headers: str) -> Any:
    while True:
        told = (await client.get(f"{PATH}/{response_id}", **headers)).json
        if told["status"] in statuses:
            return told
        await asyncio.sleep(0)


async def test_what_was_asked_in_the_background_is_polled_until_it_has_ended(
    llm: FakeLLM, client: AsgiClient
) -> None:
    llm.pieces = PIECES
    llm.gate.clear()
    begun = (await client.post(PATH, ASKED)).json
    Response.model_validate(begun)
    assert (begun["status"], begun["background"], begun["output"]) == ("queued", True, [])
    await llm.started.wait()
    assert (await client.get(f"{PATH}/{begun['id']}")).json["status"] in ("queued", "in_progress")
    llm.gate.set()
    ended = await wait_for_status(client, begun["id"], "completed")
    assert ended["output"][0]["content"][0]["text"] == "One two three."
    more = await client.post(PATH, {"input": "And?", "previous_response_id": begun["id"]})
    assert more.status == 200
    assert (await client.call("DELETE", f"{PATH}/{begun['id']}", b"", {})).json["deleted"] is True
    assert (await client.get(f"{PATH}/{begun['id']}")).status == 404


async def test_a_stream_whose_client_leaves_is_taken_up_at_any_event_without_loss(
    llm: FakeLLM, client: AsgiClient
) -> None:
    llm.pieces = PIECES
    llm.gate.clear()
    leaver = AsgiClient(client.app)
    leaving = asyncio.create_task(leaver.post(PATH, ASKED | {"stream": True}))
    await llm.started.wait()
    await asyncio.sleep(0)
    leaver.leave()
    partial = await leaving
    response_id = partial.events[0]["response"]["id"]
    kinds = [event["type"] for event in partial.events]
    assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
    assert "response.completed" not in kinds
    assert llm.ended == []  # it goes on
    following = asyncio.create_task(client.get(f"{PATH}/{response_id}?stream=true"))
    await asyncio.sleep(0)
    llm.gate.set()
    whole = (await following).events
    for event in whole:
        STREAM_EVENT.validate_json(json.dumps(event))
    assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
    assert whole[-1]["type"] == "response.completed"
    assert whole[: len(partial.events)] == partial.events
    for after in range(len(whole)):
        rest = (await client.get(f"{PATH}/{response_id}?stream=true&starting_after={after}")).events
        assert rest == whole[after + 1 :]
    told = (await client.get(f"{PATH}/{response_id}")).json
    assert told == whole[-1]["response"]


async def test_cancel_ends_it_with_what_it_has_and_may_be_said_twice(
    llm: FakeLLM, client: AsgiClient
) -> None:
    llm.pieces = PIECES
    llm.gate.clear()
    begun = asyncio.create_task(client.post(PATH, ASKED | {"stream": True}))
    await llm.started.wait()
    response_id = llm.calls[0].request_id
    cancelled = await client.post(f"{PATH}/{response_id}/cancel", b"")
    assert (cancelled.status, cancelled.json["status"]) == (200, "cancelled")
    assert (await begun).events[-1]["response"]["status"] == "cancelled"
    again = await client.post(f"{PATH}/{response_id}/cancel", b"")
    assert (again.status, again.json["status"]) == (200, "cancelled")
    whole = (await client.post(PATH, {"input": "Hello?"})).json
    refused = await client.post(f"{PATH}/{whole['id']}/cancel", b"")
    assert (refused.status, refused.error["code"]) == (400, "invalid_state")


@pytest.mark.parametrize("stream", [True, False])
async def test_cancel_is_final_though_the_engine_says_nothing(
    llm: FakeLLM, client: AsgiClient, serving: Serving, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(registry_module, "_CANCEL_S", 0.01)

    async def ignore(_ids: list[str]) -> None:
        pass

    llm.pieces, llm.holds_first, llm.abort = PIECES, not stream, ignore  # type: ignore[method-assign]
    llm.gate.clear()
    begun = asyncio.create_task(client.post(PATH, ASKED | {"stream": stream}))
    await llm.wait_for_calls(1)
    path = f"{PATH}/{llm.calls[0].request_id}"
    cancelled = await client.post(f"{path}/cancel", b"")
    Response.model_validate(cancelled.json)
    assert (cancelled.status, cancelled.json["status"]) == (200, "cancelled")
    assert (await client.get(path)).json == cancelled.json
    deleted = await client.call("DELETE", path, b"", {})
    assert (deleted.status, serving.responses.store.num_bytes) == (200, 0)
    answer = await begun
    if stream:
        assert answer.events[-1]["response"] == cancelled.json
    assert len(llm.ended) == 1  # the engine computes no more for it


async def test_what_fails_is_kept_as_failed_and_its_stream_says_why(llm: FakeLLM, client: AsgiClient) -> None:
    llm.error, llm.error_after = RequestFailedError("it kills workers", "poison_request"), 1
    events = (await client.post(PATH, ASKED | {"stream": True})).events
    assert events[-1]["type"] == "response.failed"
    told = (await client.get(f"{PATH}/{events[0]['response']['id']}")).json
    assert (told["status"], told["error"]["code"]) == ("failed", "poison_request")


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("stream=true&starting_after=x", "starting_after"),
        ("starting_after=3", "starting_after"),
        ("stream=yes", "stream"),
        ("stream=true", "stream"),
    ],
)
async def test_what_cannot_be_followed_is_refused_with_its_field(
    client: AsgiClient, query: str, param: str
) -> None:
    """The last: its events were not asked for when it began."""
    begun = (await client.post(PATH, ASKED)).json
    answer = await client.get(f"{PATH}/{begun['id']}?{query}")
    assert (answer.status, answer.error["param"]) == (400, param)
    await wait_for_status(client, begun["id"], "completed")


@pytest.mark.app(options=ServerOptions(limits=Limits(max_stored_bytes=2000)))
async def test_one_that_there_is_no_room_to_keep_is_refused(
    llm: FakeLLM, client: AsgiClient, serving: Serving
) -> None:
    refused = await client.post(PATH, ASKED | {"input": "Once upon a time " * 100})
    assert (refused.status, refused.error["code"]) == (429, "overloaded")
    assert llm.calls == []
    assert serving.responses.store.num_bytes == 0


@pytest.mark.app(options=ServerOptions(limits=Limits(max_stored_bytes=6000)))
async def test_metrics_tell_what_is_kept_and_how_background_responses_ended(
    llm: FakeLLM, client: AsgiClient, serving: Serving
) -> None:
    async def read(client: AsgiClient) -> list[float]:
        text = (await client.get("/metrics")).body.decode()
        names = ("stored_responses", "stored_response_bytes", "background_responses_running")
        names += (
            "stored_responses_evicted_total",
            *(f'background_responses_total{{status="{end}"}}' for end in ENDS),
        )
        return [float(text.partition(f"\nquire:{name} ")[2].partition("\n")[0]) for name in names]

    async def no_engines() -> dict[int, Any]:
        return {}

    llm.metrics_by_engine = no_engines  # type: ignore[attr-defined]
    store = serving.responses.store
    assert await read(client) == [0.0] * 8
    llm.gate.clear()
    ids = [(await client.post(PATH, ASKED)).json["id"] for _ in range(2)]
    assert await read(client) == [2, store.num_bytes, 2, 0, 0, 0, 0, 0]
    await client.post(f"{PATH}/{ids[0]}/cancel", b"")  # which lets the other end, too
    await wait_for_status(client, ids[1], "completed")
    assert await read(client) == [2, store.num_bytes, 0, 0, 1, 0, 1, 0]
    for response_id in ids:
        await client.call("DELETE", f"{PATH}/{response_id}", b"", {})
    await client.post(PATH, {"input": "Once upon a time " * 350})
    assert await read(client) == [0, 0, 0, 1, 1, 0, 1, 0]


@pytest.mark.app(options=ServerOptions(limits=Limits(max_stored_bytes=16_000)))
async def test_one_that_outgrows_the_room_ends(llm: FakeLLM, client: AsgiClient, serving: Serving) -> None:
    llm.pieces = ("x" * 5000,) * 8
    events = (await client.post(PATH, ASKED | {"stream": True})).events
    last = events[-1]["response"]
    assert (last["status"], last["error"]["code"]) == ("failed", "response_dropped")
    assert len(llm.ended) == 1  # the engine computes no more for it
    assert (await client.get(f"{PATH}/{last['id']}")).status == 404
    assert serving.responses.store.num_bytes == 0
